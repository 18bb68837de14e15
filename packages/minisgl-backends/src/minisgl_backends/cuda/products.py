"""What product.py and gated.py have in common."""

from __future__ import annotations

import torch

DEPTH = 64
"""Inputs that are multiplied in one step."""
THREADS = 288
"""Of a thread block: two warp groups that multiply, and a warp that fetches."""
SHARED_BYTES = 232_448 - 1024
"""A thread block's on Hopper, but for its barriers."""


def multiply(rows: int) -> str:
    """The text that products.cuh includes as MULTIPLY: wgmma of 64 rows of a, `rows` of b and 16 inputs."""
    count = rows // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    return (
        f"__device__ __forceinline__ void multiply(float (&sums)[{count}], u64 a, u64 b, int keep) {{\n"
        f'  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 2}, 0;"\n'
        f'    " wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16 {{{sums}}}, %{count}, %{count + 1}, p, 1, 1, 0, 0; }}"\n'
        f'    : {outputs} : "l"(a), "l"(b), "r"(keep));\n}}'
    )


def takes_matrix(weight: torch.Tensor) -> bool:
    """Whether the copy engine finds its way in it, in whole steps."""
    return (
        weight.is_cuda
        and weight.dtype == torch.bfloat16
        and weight.is_contiguous()
        and weight.shape[1] % DEPTH == 0
        and weight.data_ptr() % 16 == 0
    )


def takes_rows(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether x, with two dimensions, are rows of a kind that the copy engine reads, as long as the matrix's."""
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
