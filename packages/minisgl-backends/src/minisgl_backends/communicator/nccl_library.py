"""ctypes bindings of NCCL's C functions, from the library that torch uses (https://docs.nvidia.com/deeplearning/nccl)."""

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from typing import Any

import torch

from minisgl_backends.cuda.library import load_library, set_prototypes


class UniqueId(ctypes.Structure):
    """ncclUniqueId: 128 bytes that rank 0 makes and all ranks of a group share."""

    _fields_ = (("internal", ctypes.c_byte * 128),)


_PROTOTYPES: Mapping[str, tuple[Any, ...]] = {
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(UniqueId),),
    "ncclCommInitRank": (POINTER(c_void_p), c_int, UniqueId, c_int),
    "ncclCommAbort": (c_void_p,),
    # send buffer, receive buffer, count, dtype, (operation,) communicator, stream
    "ncclAllReduce": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclAllGather": (c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p),
    # buffer, count, dtype, peer, communicator, stream
    "ncclSend": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclRecv": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
}
"""Argument types by function. Each function returns an ncclResult_t, 0 for success."""

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
"""ncclDataType_t by torch dtype."""
SUM = 0
"""ncclSum of ncclRedOp_t."""


class NcclLibrary:
    """NCCL's functions with errors as exceptions. A call releases the GIL while it runs.

    Attributes:
        version: NCCL's version, such as ``2.28.9``.
    """

    def __init__(self) -> None:
        """Load the library.

        Raises:
            OSError: NCCL is not installed, or too old.
        """
        self._library = load_library("libnccl.so.2")
        set_prototypes(self._library, _PROTOTYPES)
        self._library.ncclGetErrorString.restype = c_char_p
        number = c_int()
        self.call("ncclGetVersion", ctypes.byref(number))
        self.version = f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function by name.

        Raises:
            RuntimeError: NCCL returned an error.
        """
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            reason = self._library.ncclGetErrorString(status).decode()
            raise RuntimeError(f"{name} failed: {reason} (NCCL_DEBUG=WARN shows more)")


@cache
def load_nccl() -> NcclLibrary:
    """Return the library, which is loaded once; see `NcclLibrary`."""
    return NcclLibrary()
