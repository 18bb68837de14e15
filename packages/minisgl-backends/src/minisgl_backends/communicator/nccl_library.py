"""NCCL's C functions, by ctypes, from the library that torch itself uses (https://docs.nvidia.com/deeplearning/nccl)."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Mapping
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch


class UniqueId(ctypes.Structure):
    """What the ranks of one group share: made by rank 0, 128 bytes."""

    _fields_ = (("internal", ctypes.c_byte * 128),)


_PROTOTYPES: Mapping[str, tuple[Any, ...]] = {
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(UniqueId),),
    "ncclCommInitRank": (POINTER(c_void_p), c_int, UniqueId, c_int),
    "ncclCommAbort": (c_void_p,),
    # source, destination, count, dtype, (operation,) communicator, stream
    "ncclAllReduce": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclAllGather": (c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p),
    # tensor, count, dtype, the other rank, communicator, stream
    "ncclSend": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclRecv": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
}
"""Arguments by function; each returns an ncclResult_t, 0 for success."""

DTYPES: Mapping[torch.dtype, int] = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
"""ncclDataType_t."""
SUM = 0
"""ncclRedOp_t."""


class NcclLibrary:
    """The functions as methods that raise; each releases Python's lock while it runs.

    Attributes:
        version: such as ``2.28.9``.
    """

    def __init__(self, path: str) -> None:
        """Load.

        Raises:
            OSError: it is not there, or not a library.
        """
        self._library = ctypes.CDLL(path)
        self._functions: dict[str, Callable[..., int]] = {}
        for name, arguments in _PROTOTYPES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, c_int
            self._functions[name] = function
        self._library.ncclGetErrorString.argtypes, self._library.ncclGetErrorString.restype = (c_int,), c_char_p
        number = c_int()
        self.call("ncclGetVersion", ctypes.byref(number))
        self.version = f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"

    def call(self, name: str, *arguments: Any) -> None:
        """Call one.

        Raises:
            RuntimeError: NCCL says no.
        """
        status = self._functions[name](*arguments)
        if status != 0:
            reason = self._library.ncclGetErrorString(status).decode()
            raise RuntimeError(f"{name} failed: {reason} (NCCL_DEBUG=WARN shows more)")


@lru_cache
def load_nccl() -> NcclLibrary:
    """The library that torch has loaded, or the one of its NCCL package.

    Raises:
        OSError: there is none.
    """
    try:
        return NcclLibrary("libnccl.so.2")
    except OSError:
        package = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
        for folder in (package.submodule_search_locations or []) if package else []:
            if (found := Path(folder, "lib", "libnccl.so.2")).exists():
                return NcclLibrary(str(found))
        raise
