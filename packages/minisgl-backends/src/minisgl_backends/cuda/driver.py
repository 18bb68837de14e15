"""ctypes bindings of CUDA driver functions that torch has no API for: kernel launch with PDL and clusters, TMA maps, IPC."""

import ctypes
import sys
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any, ClassVar

import torch

from minisgl_backends.cuda.library import set_prototypes
from minisgl_core.contracts.kv_cache import KVPages
from minisgl_core.utils.fp8 import FP8


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    set_prototypes(library, _PROTOTYPES)
    return library


def call(name: str, *arguments: Any) -> None:
    """Call one of the functions in `_PROTOTYPES`.

    Raises:
        RuntimeError: the driver returned an error.
        OSError: no CUDA driver is installed, or one that lacks one of the functions.
    """
    status = getattr(_library(), name)(*arguments)
    if status != 0:
        text = c_char_p()
        _library().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{name} failed: {(text.value or b'unknown error').decode()}")


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle: 64 bytes by which another process opens device memory."""

    _fields_ = (("reserved", ctypes.c_byte * 64),)


class _Attribute(ctypes.Structure):
    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_uint32 * 16))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(_Attribute)),
        ("num_attributes", c_uint),
    )


_CLUSTER_DIMENSION, _DEPENDENT_LAUNCH = 4, 6
"""CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION and CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""
_MAX_DYNAMIC_SHARED_BYTES = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
_PROTOTYPES: Mapping[str, tuple[Any, ...]] = {
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuOccupancyMaxActiveClusters": (POINTER(c_int), c_void_p, POINTER(_LaunchConfig)),
    "cuLaunchKernelEx": (POINTER(_LaunchConfig), c_void_p, c_void_p, c_void_p),
    # tensor map, data type, rank, address, dimensions, strides, box, element strides, interleave, swizzle, L2 promotion, fill
    "cuTensorMapEncodeTiled": (
        c_void_p, c_int, c_uint32, c_uint64, POINTER(c_uint64), POINTER(c_uint64), POINTER(c_uint32), POINTER(c_uint32), c_int,
        c_int, c_int, c_int,
    ),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemsetD32_v2": (c_uint64, c_uint, c_size_t),
    "cuIpcGetMemHandle": (POINTER(IpcHandle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
}  # fmt: skip
"""Argument types by function. Each function returns a CUresult, 0 for success."""


class Kernel:
    """A kernel of a cubin, loaded on the current device."""

    def __init__(self, cubin: bytes, name: str, *, num_threads: int, shared_bytes: int, cluster: int) -> None:
        """Load the kernel.

        Thread blocks have `num_threads` threads and `shared_bytes` of dynamic shared memory. A cluster has `cluster` of them.
        """
        torch.cuda.current_stream().synchronize()  # makes the device's context current in this thread
        module, self._function = c_void_p(), c_void_p()
        call("cuModuleLoadData", ctypes.byref(module), cubin)  # never unloaded
        call("cuModuleGetFunction", ctypes.byref(self._function), module, name.encode())
        call("cuFuncSetAttribute", self._function, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
        self._num_threads, self._shared_bytes, self._cluster = num_threads, shared_bytes, cluster
        self._device = torch.cuda.current_device()
        self._configs: dict[tuple[int, int], _LaunchConfig] = {}
        """Launch configurations by number of thread blocks and stream."""

    def max_resident_blocks(self) -> int:
        """Return the number of thread blocks that the device holds at once, with one per SM."""
        if self._cluster == 1:
            return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)
        count, config = c_int(), self._config(self._cluster, 0)
        call("cuOccupancyMaxActiveClusters", ctypes.byref(count), self._function, ctypes.byref(config))
        return count.value * self._cluster

    def launch(self, num_blocks: int, arguments: "Sequence[Argument]") -> None:
        """Enqueue on the current stream with PDL. The kernel may start before the previous one ends, and must wait for it.

        Args:
            num_blocks: a multiple of the cluster size.
            arguments: see `Argument`.
        """
        # Without a device, torch would look for GPUs at each launch.
        key = num_blocks, torch.cuda.current_stream(self._device).cuda_stream
        if (config := self._configs.get(key)) is None:
            config = self._configs[key] = self._config(*key)
        words = kernel_parameters(arguments)
        addresses = ctypes.addressof(words) + 8 * len(arguments)
        call("cuLaunchKernelEx", ctypes.byref(config), self._function, addresses, None)

    def _config(self, num_blocks: int, stream: int) -> _LaunchConfig:
        """Return the launch configuration, which keeps its attributes alive."""
        attributes = (_Attribute * 2)()
        attributes[0].id, attributes[0].value[0] = _DEPENDENT_LAUNCH, 1
        attributes[1].id, attributes[1].value[:3] = _CLUSTER_DIMENSION, (self._cluster, 1, 1)
        grid, block = (num_blocks, 1, 1), (self._num_threads, 1, 1)
        return _LaunchConfig(grid, block, self._shared_bytes, stream, attributes, 1 + (self._cluster > 1))


class TensorMap:
    """A CUtensorMap: describes a tensor in bfloat16 or FP8 to Hopper's TMA, which loads boxes of it with 128-byte swizzle.

    Attributes:
        address: address of the 128 bytes that are passed to the kernel.
    """

    # Values of CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion.
    _DTYPES: ClassVar = {torch.bfloat16: 9, FP8: 0}  # FP8 as bytes
    _SWIZZLE_128 = 3
    _PROMOTIONS: ClassVar = {128: 2, 256: 3}

    def __init__(self, tensor: torch.Tensor, box: Sequence[int], *, promote: int = 256) -> None:
        """Encode the map. Elements of a box outside of the tensor are read as zeros.

        Args:
            tensor: contiguous in the last dimension; the other strides and the address are multiples of 16 bytes.
            box: size of a box in each dimension, at most 128 bytes in the last.
            promote: L2 promotion in bytes, 128 or 256.
        """
        self._bytes = ctypes.create_string_buffer(128 + 64)
        self.address = -(-ctypes.addressof(self._bytes) // 64) * 64
        num, size = tensor.dim(), tensor.element_size()
        pitches = [stride * size for stride in tensor.stride()[-2::-1]]
        call(
            "cuTensorMapEncodeTiled", self.address, self._DTYPES[tensor.dtype], num, tensor.data_ptr(),
            (c_uint64 * num)(*tensor.shape[::-1]), (c_uint64 * (num - 1))(*pitches), (c_uint32 * num)(*box[::-1]),
            (c_uint32 * num)(*[1] * num), 0, self._SWIZZLE_128, self._PROMOTIONS[promote], 0,
        )  # fmt: skip


def mappable(x: torch.Tensor) -> torch.Tensor:
    """Return a bfloat16 tensor, [..., D], if `TensorMap` takes it, else a copy."""
    if x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in x.stride()[:-1]):
        return x
    # `contiguous` would return x itself if it has one row, of any stride, or if only its address is not aligned.
    return x.clone(memory_format=torch.contiguous_format)


def kv_maps(pool: KVPages, num_lines: int, *, promote: int = 256) -> list[tuple[TensorMap, ...]]:
    """Return the maps of each layer's K and V: two for boxes of up to 64 tokens of a page, then two for boxes of 8 tokens.

    Args:
        pool: KV pool in bfloat16 or FP8, of layout NHD.
        num_lines: lines of 128 bytes per token in a box; a head of 128 has two in bfloat16.
        promote: see `TensorMap`.
    """
    spec, maps = pool.spec, []
    size = 128 // spec.dtype.itemsize  # elements per line
    for layer in range(spec.num_layers):
        lines = [
            each.view(-1, spec.num_kv_heads * spec.head_dim // size, size) for each in (pool.k(layer), pool.v(layer))
        ]
        boxes = [(num_tokens, num_lines, size) for num_tokens in (min(spec.page_size, 64), 8)]
        maps.append(tuple(TensorMap(each, box, promote=promote) for box in boxes for each in lines))
    return maps


Argument = torch.Tensor | TensorMap | int | float | None
"""Argument of a kernel. Tensors are passed by address, None as a null pointer, and numbers as C's ``int`` or ``float``."""


def kernel_parameters(arguments: Sequence[Argument]) -> ctypes.Array[c_uint64]:
    """Return the arguments as C values of 8 bytes each, followed by the addresses of the kernel's parameters.

    These are addresses in the returned array, or of tensor maps. Assigning a list to an array is several times as fast as making
    the values one by one. That matters in steps with prompts, which launch two kernels per layer.
    """
    num = len(arguments)
    words = (c_uint64 * (2 * num))()
    words[:num] = [
        each.data_ptr() if isinstance(each, torch.Tensor)
        else each if isinstance(each, int)  # the kernel reads the first 4 bytes
        else int.from_bytes(c_float(each), sys.byteorder) if isinstance(each, float)
        else 0 if each is None
        else each.address
        for each in arguments
    ]  # fmt: skip
    first = ctypes.addressof(words)
    own = range(first, first + 8 * num, 8)
    words[num:] = [
        each.address if isinstance(each, TensorMap) else address for each, address in zip(arguments, own, strict=True)
    ]
    return words
