"""Shared parts of small_m_gemm.py, int4_gemm.py and gated_gemm.py."""

from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

from minisgl_backends.cuda.compiler import compile_async
from minisgl_backends.cuda.driver import Kernel

LINE_BYTES = 128
"""Bytes of a row of x or of the weight per pipeline stage."""
BLOCK_K = LINE_BYTES // 2
"""Inputs per pipeline stage in bfloat16."""
THREADS = 288
"""Threads per block: two consumer warpgroups and a producer warp."""
SHARED_BYTES = 227 * 1024 - 1024
"""Dynamic shared memory of a thread block: the 227 KiB of Hopper without 1 KiB for mbarriers, which are static."""
ALIGNMENT_BYTES = 1024
"""Size of the part of SHARED_BYTES that aligns the ring of stages, as the 128-byte swizzle requires."""


@dataclass(frozen=True, slots=True)
class BlockResources:
    """Resources of an SM that a thread block requests. The defaults leave no shared memory for a second one.

    Attributes:
        shared_bytes: dynamic shared memory.
        num_threads: threads per block; those beyond THREADS exit at once, but keep their registers.
    """

    shared_bytes: int = SHARED_BYTES
    num_threads: int = THREADS


class GemmVariant(Hashable, Protocol):
    """Compile-time parameters of a GEMM kernel."""

    @property
    def cluster_blocks(self) -> int:
        """Return the thread blocks per cluster."""
        ...

    @property
    def resources(self) -> BlockResources:
        """Return what a thread block requests."""
        ...

    def source(self) -> str:
        """Return the program's source."""
        ...


@cache
def compiled(variant: GemmVariant) -> Future[bytes]:
    """Start compiling a variant, unless that was done before, and return the future of its cubin."""
    return compile_async(variant.source())


@cache
def load_kernel(variant: GemmVariant, name: str, device: torch.device) -> tuple[Kernel, int]:
    """Return the kernel `name` of a variant, and the number of thread blocks that the device holds."""
    threads, shared = variant.resources.num_threads, variant.resources.shared_bytes
    with torch.cuda.device(device):
        cubin = compiled(variant).result()
        kernel = Kernel(cubin, name, num_threads=threads, shared_bytes=shared, cluster=variant.cluster_blocks)
        return kernel, kernel.max_resident_blocks()


def wgmma_source(rows: int, *, from_registers: bool = False, transposes_b: bool = False, dtype: str = "bf16") -> str:
    """Return the source for ``#include WGMMA``: a wgmma of 64 rows of a, `rows` of b and 32 bytes of inputs.

    Args:
        rows: N of the instruction, a multiple of 8 up to 256.
        from_registers: the rows of a are in registers, ``const u32 (&a)[4]``, instead of shared memory.
        transposes_b: b is MN-major: for each input, the values of its rows are contiguous. Needs `from_registers`.
        dtype: dtype of a and b, ``bf16``, ``f16`` or ``e4m3``.
    """
    count = rows // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    if from_registers:
        parameter, transposes = "const u32 (&a)[4]", f", {int(transposes_b)}"
        values = ", ".join(f'"r"(a[{i}])' for i in range(4))
        operand, next_operand = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}", count + 4
    else:
        parameter, values, transposes = "u64 a", '"l"(a)', "" if dtype == "e4m3" else ", 0, 0"
        operand, next_operand = f"%{count}", count + 1
    depth = 32 if dtype == "e4m3" else 16
    instruction = f"wgmma.mma_async.sync.aligned.m64n{rows}k{depth}.f32.{dtype}.{dtype}"
    return (
        f"__device__ __forceinline__ void wgmma(float (&sums)[{count}], {parameter}, u64 b, int keep) {{\n"
        f'  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{next_operand + 1}, 0;"\n'
        f'    " {instruction} {{{sums}}}, {operand}, %{next_operand}, p, 1, 1{transposes}; }}"\n'
        f'    : {outputs} : {values}, "l"(b), "r"(keep));\n}}'
    )


def can_load_weight(weight: torch.Tensor, *dtypes: torch.dtype) -> bool:
    """Return True if TMA can load the weight matrix, its dtype is one of `dtypes`, and rows are a multiple of LINE_BYTES long."""
    return (
        weight.is_cuda
        and weight.dtype in dtypes
        and weight.is_contiguous()
        and weight.shape[1] * weight.element_size() % LINE_BYTES == 0
        and weight.data_ptr() % 16 == 0
    )


def can_load_input(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return True if TMA can load x, with two dimensions, and its rows are as long as the weight's."""
    num_inputs = weight.shape[1]
    return (
        x.shape[1] == num_inputs
        and x.dtype == torch.bfloat16
        and x.device == weight.device
        and x.stride(1) == 1
        and x.stride(0) >= num_inputs
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
    )
