"""Inputs of the ops kit, and their expected results in float64.

The shape legend is that of `minisgl_core.contracts.ops`.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from minisgl_core.contracts.ops import Rope

EPS = 1e-5
"""Epsilon of the norms."""

RotaryShape = tuple[int, int, int, int]
"""Query heads, KV heads, head dimension, half of the rotary dimension."""


def random(*size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return a normally distributed tensor; calls with the same size return the same values."""
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).to(device, dtype)


def views(size: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Return tensors of shape [..., size]: of one to four dimensions, slices of wider tensors, and a transposed one."""

    def make(*shape: int) -> torch.Tensor:
        return random(*shape, dtype=dtype, device=device)

    return [
        make(size),
        make(2, 3, size),
        make(2, 2, 2, size),
        make(5, size + 24)[:, 8 : size + 8],
        make(3, 6, size)[:, 2:5],
        make(size, 4).t(),
    ]


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the RMSNorm over the last dimension in float64."""
    return F.rms_norm(x.double(), weight.shape, weight.double(), EPS)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up`` in float64."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return ``gelu(gate) * up`` in float64, with the tanh approximation."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x [T, heads, D] after RoPE, in float64; each pair of dimensions is rotated as a complex number."""
    half = cos.shape[-1]
    x = x.double()
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half])
    pairs = pairs * torch.complex(cos.double(), sin.double())[:, None]
    return torch.cat((pairs.real, pairs.imag, x[..., 2 * half :]), -1)


class RopeCase(NamedTuple):
    """Inputs of RoPE: slices of one fused projection [T, Hq + 2 * Hkv, D], and the expected q and k in float64."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rope: Rope
    expected: tuple[torch.Tensor, torch.Tensor]


def rotation_case(
    shape: RotaryShape, has_norms: bool, dtype: torch.dtype, table_dtype: torch.dtype, device: str, step: int = 0
) -> RopeCase:
    """Return a case of three tokens.

    Args:
        has_norms: True to apply QK norms before RoPE.
        dtype: dtype of q, k and v.
        table_dtype: dtype of cos, sin and the norms' weights.
        step: number of the step; each step has other angles.
    """
    num_q_heads, num_kv_heads, size, half = shape
    q, k, v = random(3, num_q_heads + 2 * num_kv_heads, size, dtype=dtype, device=device).tensor_split(
        (num_q_heads, num_q_heads + num_kv_heads), dim=1
    )
    angles = (2 + step) * random(3, half, dtype=torch.float32, device=device)
    cos, sin = angles.cos().to(table_dtype), angles.sin().to(table_dtype)
    if not has_norms:
        return RopeCase(q, k, v, Rope(cos, sin), (rotated(q, cos, sin), rotated(k, cos, sin)))
    q_norm, k_norm = (random(size, dtype=table_dtype, device=device) + offset for offset in (0, 1))
    expected = rotated(normed(q, q_norm), cos, sin), rotated(normed(k, k_norm), cos, sin)
    return RopeCase(q, k, v, Rope(cos, sin, (q_norm, k_norm), EPS), expected)
