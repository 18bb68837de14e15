"""Device memory that the ranks of one host share by CUDA IPC, over NVLink or PCIe."""

import ctypes
from contextlib import suppress
from ctypes import c_uint64
from typing import Any

import torch

from minisgl_backends.communicator.rendezvous import Rendezvous
from minisgl_backends.cuda.driver import IpcHandle, call
from minisgl_core.errors import ProviderUnsupportedError

_LAZY_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS."""


class PeerMemory:
    """A buffer of equal size on each rank's device, mapped into the processes of all ranks.

    Attributes:
        addresses: address of each rank's buffer in this process, in rank order.
    """

    def __init__(self, rendezvous: Rendezvous, rank: int, device: torch.device, num_words: int, fill: int) -> None:
        """Allocate this rank's buffer and map the others'. Every rank calls it.

        Args:
            rendezvous: rendezvous of the ranks.
            rank: this rank.
            device: this rank's device, current in this thread.
            num_words: size in words of 4 bytes.
            fill: initial value of each word, set before any other rank can write.

        Raises:
            RuntimeError: a rank did not join, or the device is out of memory.
            ProviderUnsupportedError: CUDA IPC does not work between these processes.
        """
        self._device, self._rendezvous = device, rendezvous
        self._opened: list[int] = []
        own = c_uint64()
        torch.cuda.synchronize(device)  # makes the device's context current in this thread
        call("cuMemAlloc_v2", ctypes.byref(own), 4 * num_words)
        self._own: int | None = own.value
        try:
            call("cuMemsetD32_v2", own, fill, num_words)
            torch.cuda.synchronize(device)
            handles = rendezvous.gather(self._export(own).hex())
            self.addresses = [
                own.value if other == rank else self._open(bytes.fromhex(handle))
                for other, handle in enumerate(handles)
            ]
        except BaseException:
            with suppress(RuntimeError):
                self.close()
            raise

    def _export(self, memory: c_uint64) -> bytes:
        handle = IpcHandle()
        self._ipc_call("cuIpcGetMemHandle", ctypes.byref(handle), memory)
        return bytes(handle)

    def _open(self, handle: bytes) -> int:
        address = c_uint64()
        self._ipc_call(
            "cuIpcOpenMemHandle_v2", ctypes.byref(address), IpcHandle.from_buffer_copy(handle), _LAZY_PEER_ACCESS
        )
        self._opened.append(address.value)
        return address.value

    def _ipc_call(self, name: str, *arguments: Any) -> None:
        try:
            call(name, *arguments)
        except RuntimeError as error:
            reason = f"processes cannot share GPU memory by CUDA IPC ({error}), as in WSL2 and some containers"
            raise ProviderUnsupportedError(
                "communicator", "oneshot", [f"{reason}; use --communicator torch"]
            ) from error

    def close(self, timeout_s: float = 0.0) -> None:
        """Unmap the other ranks' buffers and free this rank's, once no kernel uses them. Safe to call twice.

        Args:
            timeout_s: longest wait for each other rank to unmap the buffer, which CUDA requires before it is freed.
        """
        own, self._own = self._own, None
        if own is None:
            return
        torch.cuda.synchronize(self._device)
        for address in self._opened:
            call("cuIpcCloseMemHandle", address)
        if timeout_s:
            self._rendezvous.final_barrier(timeout_s)
        call("cuMemFree_v2", own)
