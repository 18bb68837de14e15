"""Collectives by torch.distributed's backends: NCCL for GPUs, Gloo for CPUs."""

import socket
import threading
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, PrefixStore

from minisgl_backends.communicator.rendezvous import Rendezvous
from minisgl_core.contracts.communicator import Communicator, CommunicatorSpec

_BACKENDS = {"cuda": ("NCCL", dist.is_nccl_available), "cpu": ("Gloo", dist.is_gloo_available)}


class TorchCommunicator(Communicator):
    """Communicator over a process group of its own, made from a store and a backend without `init_process_group`.

    torch's default group stays free for the application that embeds the engine, and a process may hold any number of
    communicators. The ranks meet as `Rendezvous` describes.

    On CPUs, a collective that a rank does not join within ``spec.timeout_s`` raises RuntimeError. On GPUs it is only enqueued,
    and NCCL's watchdog ends the process instead (TORCH_NCCL_ASYNC_ERROR_HANDLING).
    """

    @classmethod
    def unsupported(cls, spec: CommunicatorSpec) -> list[str]:
        if not dist.is_available():
            return ["this build of torch has no torch.distributed"]
        if spec.device.type not in _BACKENDS:
            return [f"it supports {' and '.join(_BACKENDS)}, not {spec.device.type}"]
        name, is_available = _BACKENDS[spec.device.type]
        return [] if is_available() else [f"this build of torch has no {name}"]

    def __init__(self, spec: CommunicatorSpec) -> None:
        """Join the group.

        Raises:
            RuntimeError: not all ranks joined within ``spec.timeout_s``.
        """
        super().__init__(spec)
        self._rendezvous = Rendezvous(spec)
        # NCCL's initialization has no timeout, so a barrier with one comes first.
        self._rendezvous.gather(None)
        timeout = timedelta(seconds=spec.timeout_s)
        self._group: Any = _backend(spec, PrefixStore("collectives", self._rendezvous.store), timeout)
        self._device, self._lock = spec.device, threading.Lock()
        # NCCL connects at the first collective. Here, a failure is still a startup error.
        self.all_reduce(torch.zeros(1, device=spec.device))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum in `x`'s dtype, in place if `x` is contiguous. Every rank gets the same bits."""
        x = x.contiguous()
        options = AllreduceOptions()
        options.asyncOp = False
        _finish(self._open_group().allreduce([x], options))
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Gather along a new first dimension, then move that to `dim`."""
        dim %= x.ndim
        options = AllgatherOptions()
        options.asyncOp = False
        gathered = x.new_empty(self.size, *x.shape)
        _finish(self._open_group()._allgather_base(gathered, x.contiguous()[None], options))
        return gathered.movedim(0, dim).flatten(dim, dim + 1)

    def send(self, x: torch.Tensor, dst: int) -> None:
        _finish(self._open_group().send([x.contiguous()], dst, 0))

    def recv(self, x: torch.Tensor, src: int) -> torch.Tensor:
        _finish(self._open_group().recv([x], src, 0))
        return x

    def broadcast_object(self, value: object) -> object:
        """Broadcast through the store as JSON, so tuples arrive as lists, on rank 0 too."""
        self._open_group()
        return self._rendezvous.broadcast(value)

    def abort(self) -> None:
        """Stop NCCL's kernels. With Gloo there is nothing to stop: the connection to a rank that ended breaks."""
        if self._device.type == "cuda":
            with self._lock:
                group, self._group = self._group, None
            if group is not None:
                group.abort()

    def close(self) -> None:
        """Close the group's connections. NCCL is aborted instead, since its shutdown would wait for the other ranks."""
        if self._group is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self.abort()
        else:
            group, self._group = self._group, None
            group.shutdown()

    def _open_group(self) -> Any:
        if self._group is None:
            raise RuntimeError("the communicator is closed, or another rank has failed")
        return self._group


def _finish(work: Any) -> None:
    """Wait for `work`; NCCL returns None once the work is on the current stream."""
    if work is not None:
        work.wait()


def _backend(spec: CommunicatorSpec, store: PrefixStore, timeout: timedelta) -> Any:
    # Any, since torch's stubs lack most attributes of these classes.
    backends: Any = dist
    if spec.device.type == "cuda":
        torch.cuda.set_device(spec.device)
        nccl = backends.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return backends.ProcessGroupNCCL(store, spec.rank, spec.size, nccl)
    gloo = backends.ProcessGroupGloo._Options()
    gloo._timeout = timeout
    gloo._devices = [backends.ProcessGroupGloo.create_device(hostname=_own_address(spec.init_method))]
    return backends.ProcessGroupGloo(store, spec.rank, spec.size, gloo)


def _own_address(url: str) -> str:
    """Return the address at which this host reaches the host of `url`; the host's name may resolve to another one."""
    host = urlparse(url).hostname or "127.0.0.1"
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # connecting a UDP socket sends nothing
        probe.connect(address)
        return str(probe.getsockname()[0])
