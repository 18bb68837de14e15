"""Activations of gated MLPs: SiLU or GELU of the gate, multiplied by up."""

from typing import Any

import torch
import triton
import triton.language as tl

from minisgl_backends.kernels.dependent_launch import await_previous, launch_options


@triton.jit
def silu(x):
    """Return ``x * sigmoid(x)`` of float32 x."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gelu_tanh(x):
    """Return GELU of float32 x with the tanh approximation."""
    # 1 + tanh(y) = 2 / (1 + exp(-2 * y)), y = sqrt(2 / pi) * (x + 0.044715 * x**3)
    return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit
def silu_and_mul_in(gate, up, dtype: tl.constexpr):
    """Return ``silu(gate) * up`` of float32 values, in float32. Gate, up and silu(gate) are rounded to `dtype`, as in torch."""
    activated = silu(gate.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    return activated * up.to(dtype).to(tl.float32)


@triton.jit
def _activation_and_mul(gate_up, out, N, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Round the activation and the product to the dtype of `gate_up`, as torch does."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < N
    await_previous(PDL)
    gate = tl.load(gate_up + row * 2 * N + columns, mask=mask, other=0.0)
    up = tl.load(gate_up + row * 2 * N + N + columns, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    if ACTIVATION == "gelu_tanh":
        activated = gelu_tanh(wide)
    else:
        tl.static_assert(ACTIVATION == "silu")
        activated = silu(wide)
    tl.store(out + row * N + columns, activated.to(gate.dtype).to(tl.float32) * up.to(tl.float32), mask=mask)


def silu_and_mul(gate_up: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """Return ``silu(gate) * up`` of [..., gate | up]; `pdl` launches with PDL, see `dependent_launch`."""
    return _launch(gate_up, "silu", pdl)


def gelu_tanh_and_mul(gate_up: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """Return ``gelu(gate) * up`` with the tanh approximation; see `silu_and_mul`."""
    return _launch(gate_up, "gelu_tanh", pdl)


def _launch(gate_up: torch.Tensor, activation: str, pdl: bool) -> torch.Tensor:
    gate_up, size = gate_up.contiguous(), gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    num_rows = out.numel() // size
    if num_rows:
        block = min(triton.next_power_of_2(size), 2048)
        grid: Any = (num_rows, triton.cdiv(size, block))
        options = {"ACTIVATION": activation, "BLOCK": block, "num_warps": 8, **launch_options(pdl)}
        _activation_and_mul[grid](gate_up, out, size, **options)
    return out
