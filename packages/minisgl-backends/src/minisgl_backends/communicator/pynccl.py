"""Collectives by NCCL itself, put on the current CUDA stream without torch.distributed in between."""

from __future__ import annotations

import ctypes
import logging
import threading
from contextlib import suppress

import torch

from minisgl_backends.communicator.meeting import Meeting
from minisgl_backends.communicator.nccl_library import DTYPES, SUM, NcclLibrary, UniqueId, load_nccl
from minisgl_core.contracts.communicator import Communicator, CommunicatorSpec

logger = logging.getLogger(__name__)


class NcclCommunicator(Communicator):
    """A collective is one call into NCCL, which CUDA graphs record like any kernel.

    Nothing watches for a rank that does not join in: whoever started the ranks notices one that ends, and calls `abort`.
    """

    @classmethod
    def unsupported(cls, spec: CommunicatorSpec) -> list[str]:
        """Says where there is no NVIDIA GPU or no NCCL."""
        if spec.device.type != "cuda" or torch.version.cuda is None:
            return [f"it serves NVIDIA GPUs, not {spec.device.type}"]
        try:
            load_nccl()
        except OSError as error:
            return [f"NCCL's library does not load: {error}"]
        return []

    def __init__(self, spec: CommunicatorSpec) -> None:
        """Join the group.

        Raises:
            RuntimeError: not all ranks came within ``spec.timeout_s``, or NCCL cannot connect them.
        """
        super().__init__(spec)
        self._device, self._nccl = spec.device, load_nccl()
        torch.cuda.set_device(spec.device)
        torch.cuda.current_stream().synchronize()  # the device has a context now
        self.meeting = Meeting(spec)
        # NCCL's own connecting waits for ever, so a rank that fails before must not be missed only there.
        self.meeting.gather(None)
        self._lock = threading.Lock()
        self._comm: ctypes.c_void_p | None = self._connect(self._nccl)
        if self.rank == 0:
            logger.info("NCCL %s connects %d ranks", self._nccl.version, self.size)
        # It allocates at the first collective: have it here, where an error is still one of start-up.
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
        shared = bytes.fromhex(self.meeting.broadcast(bytes(unique).hex()))
        nccl.call("ncclCommInitRank", ctypes.byref(comm), self.size, UniqueId.from_buffer_copy(shared), self.rank)
        return comm

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums in `x`'s dtype, in place where `x` is contiguous; every rank gets the same bits."""
        x = x.contiguous()
        place = x.data_ptr()
        self._call("ncclAllReduce", place, place, x.numel(), DTYPES[x.dtype], SUM)
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Gathers along a new first dimension, then moves it into place."""
        dim %= x.ndim
        mine = x.contiguous()
        gathered = x.new_empty(self.size, *x.shape)
        self._call("ncclAllGather", mine.data_ptr(), gathered.data_ptr(), mine.numel(), DTYPES[x.dtype])
        return gathered.movedim(0, dim).flatten(dim, dim + 1)

    def send(self, x: torch.Tensor, dst: int) -> None:
        """Enqueued; the kernel waits for the receiver."""
        mine = x.contiguous()
        self._call("ncclSend", mine.data_ptr(), mine.numel(), DTYPES[x.dtype], dst)

    def recv(self, x: torch.Tensor, src: int) -> torch.Tensor:
        """Enqueued; the kernel waits for the sender."""
        self._call("ncclRecv", x.data_ptr(), x.numel(), DTYPES[x.dtype], src)
        return x

    def _call(self, name: str, *arguments: int) -> None:
        if self._comm is None:
            raise RuntimeError("the communicator is closed, or another rank is gone")
        self._nccl.call(name, *arguments, self._comm, torch.cuda.current_stream(self._device).cuda_stream)

    def broadcast_object(self, value: object) -> object:
        """Goes through the store as JSON, so tuples arrive as lists, on rank 0 too."""
        return self.meeting.broadcast(value)

    def abort(self) -> None:
        """End NCCL's kernels on this device and free its buffers, once the graphs that hold such kernels are freed."""
        with self._lock:
            comm, self._comm = self._comm, None
        if comm is not None:
            self._nccl.call("ncclCommAbort", comm)

    def close(self) -> None:
        """Leave the group. By an abort of nothing: `ncclCommDestroy` would wait for the other ranks to call it, too."""
        if self._comm is not None:
            torch.cuda.synchronize(self._device)
            self.abort()
