"""Inputs that the kit of ops gives to a provider, and the expected results in float64.

Letters are those of `minisgl_core.contracts.ops`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from minisgl_core.contracts.ops import LinearOp, LinearOps, Rotation
from minisgl_core.utils.fp8 import FP8_MAX, to_fp8

EPS = 1e-5
"""Of the norms."""

HeadShape = tuple[int, int, int, int]
"""Query heads, KV heads, head dimension, half of the rotary dimension."""


def random(*size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Normally distributed, the same for the same size."""
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).to(device, dtype)


def views(size: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """[..., size]: of several dimensions, parts of wider tensors, and with the last dimension not contiguous."""

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


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ weight.T + bias``."""
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    """The norm over the last dimension."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def activated(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate * gate.sigmoid() * up


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[T, heads, D], each pair as a complex number."""
    half = cos.shape[-1]
    x = x.double()
    turned = torch.complex(x[..., :half], x[..., half : 2 * half])
    turned = turned * torch.complex(cos.double(), sin.double())[:, None]
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), -1)


def gemms(
    ops: LinearOps, weight: torch.Tensor, bias: torch.Tensor | None, in_fp8: bool
) -> Iterator[tuple[LinearOp, LinearOp]]:
    """Prepare a plain GEMM by this weight and a gated one, and return each with its expected result."""
    if not in_fp8:
        prepared = [prepare(weight.clone(), bias) for prepare in (ops.prepare_linear, ops.prepare_gated)]
        wide = weight.double()
    else:
        scales = weight.float().abs().amax(1) / FP8_MAX
        codes = to_fp8(weight, scales[:, None])
        prepared = [prepare(codes, scales, bias) for prepare in (ops.prepare_fp8_linear, ops.prepare_fp8_gated)]
        wide = codes.double() * scales.double()[:, None]

    def plain(x: torch.Tensor) -> torch.Tensor:
        if in_fp8:
            of_x, of_rows = ops.quantize_rows(x.reshape(-1, x.shape[-1]))
            x = (of_x.double() * of_rows).view(x.shape)
        return linear(x, wide, bias)

    def gated(x: torch.Tensor) -> torch.Tensor:
        return activated(plain(x))

    return zip(prepared, (plain, gated), strict=True)


@dataclass(frozen=True, slots=True)
class RotationCase:
    """Queries and keys to turn.

    Attributes:
        q: [T, Hq, D].
        k: [T, Hkv, D], behind q in one tensor.
        v: like k, behind it.
        rotation: how to turn them.
        expected: q and k as they must become.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rotation: Rotation
    expected: tuple[torch.Tensor, torch.Tensor]


def rotation_case(
    shape: HeadShape, has_norms: bool, dtype: torch.dtype, table_dtype: torch.dtype, device: str, step: int = 0
) -> RotationCase:
    """Six tokens, at other positions in each step; `table_dtype` is that of cos and sin."""
    num_q_heads, num_kv_heads, size, half = shape
    q, k, v = random(6, num_q_heads + 2 * num_kv_heads, size, dtype=dtype, device=device).tensor_split(
        (num_q_heads, num_q_heads + num_kv_heads), dim=1
    )
    angles = (2 + step) * random(6, half, dtype=torch.float32, device=device)
    cos, sin = angles.cos().to(table_dtype), angles.sin().to(table_dtype)
    if not has_norms:
        return RotationCase(q, k, v, Rotation(cos, sin), (rotated(q, cos, sin), rotated(k, cos, sin)))
    of_q, of_k = random(size, dtype=dtype, device=device), random(size, dtype=dtype, device=device) + 1
    expected = rotated(normed(q, of_q), cos, sin), rotated(normed(k, of_k), cos, sin)
    return RotationCase(q, k, v, Rotation(cos, sin, (of_q, of_k), EPS), expected)
