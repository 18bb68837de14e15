"""Shared parts of small_m_gemm.py and gated_gemm.py."""

from __future__ import annotations

import torch

DEPTH = 64
"""Inputs per pipeline stage."""
THREADS = 288
"""Threads per block: two consumer warpgroups and a producer warp."""
SHARED_BYTES = 232_448 - 1024
"""Dynamic shared memory of a thread block on Hopper, without its mbarriers."""


def wgmma_source(rows: int) -> str:
    """Return the source that gemm_common.cuh includes as WGMMA: a wgmma of 64 rows of a, `rows` of b and 16 inputs."""
    count = rows // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    return (
        f"__device__ __forceinline__ void wgmma(float (&sums)[{count}], u64 a, u64 b, int keep) {{\n"
        f'  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 2}, 0;"\n'
        f'    " wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16 {{{sums}}}, %{count}, %{count + 1}, p, 1, 1, 0, 0; }}"\n'
        f'    : {outputs} : "l"(a), "l"(b), "r"(keep));\n}}'
    )


def supports_weight(weight: torch.Tensor) -> bool:
    """Return True if TMA can load the weight matrix, and K is a multiple of DEPTH."""
    return (
        weight.is_cuda
        and weight.dtype == torch.bfloat16
        and weight.is_contiguous()
        and weight.shape[1] % DEPTH == 0
        and weight.data_ptr() % 16 == 0
    )


def supports_input(x: torch.Tensor, weight: torch.Tensor) -> bool:
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
