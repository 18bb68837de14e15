"""Device memory that the ranks of one host write into, through NVLink or PCIe. CUDA's driver functions by ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64
from functools import lru_cache
from typing import Any

import torch

from minisgl_backends.communicator.meeting import Meeting


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * 64),)


_LAZY_PEER_ACCESS = 1
_PROTOTYPES: Mapping[str, tuple[Any, ...]] = {
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemsetD32_v2": (c_uint64, c_uint, c_size_t),
    "cuIpcGetMemHandle": (POINTER(_IpcHandle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), _IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
}
"""Arguments by function; each returns a CUresult, 0 for success."""


@lru_cache
def _driver() -> Callable[..., None]:
    """``call(name, *arguments)``; raises RuntimeError where the driver says no."""
    library = ctypes.CDLL("libcuda.so.1")
    for name, arguments in _PROTOTYPES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_int
    library.cuGetErrorString.argtypes, library.cuGetErrorString.restype = (c_int, POINTER(c_char_p)), c_int

    def call(name: str, *arguments: Any) -> None:
        status = getattr(library, name)(*arguments)
        if status != 0:
            text = c_char_p()
            library.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name} failed: {(text.value or b'unknown error').decode()}")

    return call


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
            RuntimeError: the devices cannot reach each other.
        """
        self._device, self._call = device, _driver()
        mine, handle = c_uint64(), _IpcHandle()
        torch.cuda.synchronize(device)  # gives this thread the device's context
        self._call("cuMemAlloc_v2", ctypes.byref(mine), 4 * num_words)
        self._mine: int | None = mine.value
        self._call("cuMemsetD32_v2", mine, fill, num_words)
        torch.cuda.synchronize(device)
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), mine)
        handles = meeting.gather(bytes(handle).hex())
        self.addresses = [
            mine.value if other == rank else self._open(bytes.fromhex(shared)) for other, shared in enumerate(handles)
        ]
        self._opened = [address for other, address in enumerate(self.addresses) if other != rank]

    def _open(self, handle: bytes) -> int:
        address = c_uint64()
        self._call(
            "cuIpcOpenMemHandle_v2", ctypes.byref(address), _IpcHandle.from_buffer_copy(handle), _LAZY_PEER_ACCESS
        )
        return address.value

    def close(self) -> None:
        """Free this rank's and let go of the others', when no kernel uses them. Safe to call twice."""
        mine, self._mine = self._mine, None
        if mine is None:
            return
        torch.cuda.synchronize(self._device)
        for address in self._opened:
            self._call("cuIpcCloseMemHandle", address)
        self._call("cuMemFree_v2", mine)
