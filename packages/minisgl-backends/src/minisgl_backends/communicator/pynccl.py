"""Collectives by direct calls to NCCL on the current CUDA stream, without torch.distributed."""

import ctypes
import logging
import threading
from contextlib import suppress

import torch

from minisgl_backends.communicator.nccl_library import DTYPES, SUM, NcclLibrary, UniqueId, load_nccl
from minisgl_backends.communicator.rendezvous import Rendezvous
from minisgl_core.contracts.communicator import Communicator, CommunicatorSpec

logger = logging.getLogger(__name__)


class NcclCommunicator(Communicator):
    """Communicator whose collectives are single calls to NCCL, which CUDA graphs capture like any kernel.

    No watchdog detects a rank that does not join a collective. The process that started the ranks detects one that ends, and
    has `abort` called on the others.
    """

    @classmethod
    def unsupported(cls, spec: CommunicatorSpec) -> list[str]:
        if spec.device.type != "cuda" or torch.version.cuda is None:
            return [f"it needs an NVIDIA GPU, not {spec.device.type}"]
        try:
            load_nccl()
        except OSError as error:
            return [f"NCCL's library does not load: {error}"]
        return []

    def __init__(self, spec: CommunicatorSpec) -> None:
        """Join the group.

        Raises:
            RuntimeError: not all ranks joined within ``spec.timeout_s``, or NCCL cannot connect them.
        """
        super().__init__(spec)
        self._device, self._nccl = spec.device, load_nccl()
        torch.cuda.set_device(spec.device)
        torch.cuda.current_stream().synchronize()  # creates the device's context
        self.rendezvous = Rendezvous(spec)
        # ncclCommInitRank has no timeout, so a barrier with one comes first.
        self.rendezvous.gather(None)
        self._lock = threading.Lock()
        self._comm: ctypes.c_void_p | None = self._connect(self._nccl)
        if self.rank == 0:
            logger.info("NCCL %s connects %d ranks", self._nccl.version, self.size)
        # NCCL allocates at the first collective. Here, a failure is still a startup error.
        try:
            NcclCommunicator.all_reduce(self, torch.zeros(1, device=spec.device))
            torch.cuda.current_stream().synchronize()
        except BaseException:
            with suppress(RuntimeError):
                NcclCommunicator.abort(self)
            raise

    def _connect(self, nccl: NcclLibrary) -> ctypes.c_void_p:
        unique, comm = UniqueId(), ctypes.c_void_p()
        if self.rank == 0:
            nccl.call("ncclGetUniqueId", ctypes.byref(unique))
        shared = bytes.fromhex(self.rendezvous.broadcast(bytes(unique).hex()))
        nccl.call("ncclCommInitRank", ctypes.byref(comm), self.size, UniqueId.from_buffer_copy(shared), self.rank)
        return comm

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum in `x`'s dtype, in place if `x` is contiguous. Every rank gets the same bits."""
        x = x.contiguous()
        address = x.data_ptr()
        self._call("ncclAllReduce", address, address, x.numel(), DTYPES[x.dtype], SUM)
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Gather along a new first dimension, then move that to `dim`."""
        dim %= x.ndim
        own = x.contiguous()
        gathered = x.new_empty(self.size, *x.shape)
        self._call("ncclAllGather", own.data_ptr(), gathered.data_ptr(), own.numel(), DTYPES[x.dtype])
        return gathered.movedim(0, dim).flatten(dim, dim + 1)

    def send(self, x: torch.Tensor, dst: int) -> None:
        """Enqueue a send, whose kernel waits for the receiver."""
        own = x.contiguous()
        self._call("ncclSend", own.data_ptr(), own.numel(), DTYPES[x.dtype], dst)

    def recv(self, x: torch.Tensor, src: int) -> torch.Tensor:
        """Enqueue a receive, whose kernel waits for the sender."""
        self._call("ncclRecv", x.data_ptr(), x.numel(), DTYPES[x.dtype], src)
        return x

    def _call(self, name: str, *arguments: int) -> None:
        self.check_open()
        self._nccl.call(name, *arguments, self._comm, torch.cuda.current_stream(self._device).cuda_stream)

    def check_open(self) -> None:
        """Raise RuntimeError if `close` or `abort` was called."""
        if self._comm is None:
            raise RuntimeError("the communicator is closed, or another rank has failed")

    def broadcast_object(self, value: object) -> object:
        """Broadcast through the store as JSON, so tuples arrive as lists, on rank 0 too."""
        return self.rendezvous.broadcast(value)

    def abort(self) -> None:
        """Stop NCCL's kernels on this device. Its buffers are freed once the CUDA graphs with such kernels are freed."""
        with self._lock:
            comm, self._comm = self._comm, None
        if comm is not None:
            self._nccl.call("ncclCommAbort", comm)

    def close(self) -> None:
        """Leave the group by `ncclCommAbort` after all work is done: `ncclCommDestroy` would wait for the other ranks."""
        if self._comm is not None:
            torch.cuda.synchronize(self._device)
            self.abort()
