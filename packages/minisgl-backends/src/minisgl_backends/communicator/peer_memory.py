"""Device memory that the ranks of one host write into, through NVLink or PCIe."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from ctypes import POINTER, c_size_t, c_uint, c_uint64
from typing import Any

import torch

from minisgl_backends.communicator.meeting import Meeting
from minisgl_backends.cuda.driver import call, prototypes
from minisgl_core.errors import ProviderUnsupportedError


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * 64),)


_LAZY_PEER_ACCESS = 1
prototypes |= {
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemsetD32_v2": (c_uint64, c_uint, c_size_t),
    "cuIpcGetMemHandle": (POINTER(_IpcHandle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), _IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
}


class PeerMemory:
    """As many bytes on each rank's device, each rank's mapped into all of them.

    Attributes:
        addresses: where each rank's memory lies in this process, in rank order.
    """

    def __init__(self, meeting: Meeting, rank: int, device: torch.device, num_words: int, fill: int) -> None:
        """Allocate and connect; every rank calls it.

        Args:
            meeting: of the ranks.
            rank: this one.
            device: its device, current in this thread.
            num_words: 4 bytes each.
            fill: what the words hold before any other rank can write.

        Raises:
            RuntimeError: a rank did not come, or the device has no memory left.
            ProviderUnsupportedError: CUDA does not let one process have the memory of another.
        """
        self._device, self._meeting = device, meeting
        self._opened: list[int] = []
        mine = c_uint64()
        torch.cuda.synchronize(device)  # gives this thread the device's context
        call("cuMemAlloc_v2", ctypes.byref(mine), 4 * num_words)
        self._mine: int | None = mine.value
        try:
            call("cuMemsetD32_v2", mine, fill, num_words)
            torch.cuda.synchronize(device)
            handles = meeting.gather(self._export(mine).hex())
            self.addresses = [
                mine.value if other == rank else self._open(bytes.fromhex(shared))
                for other, shared in enumerate(handles)
            ]
        except BaseException:
            with suppress(RuntimeError):
                self.close()
            raise

    def _export(self, memory: c_uint64) -> bytes:
        handle = _IpcHandle()
        self._share("cuIpcGetMemHandle", ctypes.byref(handle), memory)
        return bytes(handle)

    def _open(self, handle: bytes) -> int:
        address = c_uint64()
        self._share(
            "cuIpcOpenMemHandle_v2", ctypes.byref(address), _IpcHandle.from_buffer_copy(handle), _LAZY_PEER_ACCESS
        )
        self._opened.append(address.value)
        return address.value

    def _share(self, name: str, *arguments: Any) -> None:
        try:
            call(name, *arguments)
        except RuntimeError as error:
            reason = f"a process cannot have the GPU memory of another ({error}), as in WSL2 and some containers"
            raise ProviderUnsupportedError(
                "communicator", "oneshot", [f"{reason}; use --communicator torch"]
            ) from error

    def close(self, patience_s: float = 0.0) -> None:
        """Let go of the others' memory and free this rank's, when no kernel uses them. Safe to call twice.

        Args:
            patience_s: how long to wait, before it is freed, for the others to let go of it, which CUDA asks for.
        """
        mine, self._mine = self._mine, None
        if mine is None:
            return
        torch.cuda.synchronize(self._device)
        for address in self._opened:
            call("cuIpcCloseMemHandle", address)
        if patience_s:
            self._meeting.part(patience_s)
        call("cuMemFree_v2", mine)
