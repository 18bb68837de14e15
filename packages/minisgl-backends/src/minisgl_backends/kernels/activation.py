"""SiLU and multiply, the activation of gated MLPs."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from minisgl_backends.kernels.dependent_launch import await_previous, launch_options


@triton.jit
def _silu_and_mul(gate_up, out, N, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < N
    await_previous(PDL)
    gate = tl.load(gate_up + row * 2 * N + columns, mask=mask, other=0.0)
    up = tl.load(gate_up + row * 2 * N + N + columns, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out + row * N + columns, silu.to(tl.float32) * up.to(tl.float32), mask=mask)


def silu_and_mul(gate_up: torch.Tensor, *, overlap: bool = False) -> torch.Tensor:
    """Return ``silu(gate) * up`` of [..., gate | up]; `overlap` launches with PDL, see `dependent_launch`."""
    gate_up, size = gate_up.contiguous(), gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    num_rows = out.numel() // size
    if num_rows:
        block = min(triton.next_power_of_2(size), 2048)
        grid: Any = (num_rows, triton.cdiv(size, block))
        _silu_and_mul[grid](gate_up, out, size, BLOCK=block, num_warps=8, **launch_options(overlap))
    return out
