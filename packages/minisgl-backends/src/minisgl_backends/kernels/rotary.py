"""Rotary embedding of queries and keys in one launch, after their norms where the model has them.

Shape legend: T tokens, Hq and Hkv heads, D head dimension, R half of the rotated dimensions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _gain(normed, gain):
    """Round to the model's dtype, then multiply in it."""
    return (normed.to(gain.dtype).to(tl.float32) * gain.to(tl.float32)).to(gain.dtype)


@triton.jit
def _heads(
    x, stride_t, stride_h, token, cos, sin, weight, eps, heads,
    D: tl.constexpr, R: tl.constexpr, D_BLOCK: tl.constexpr, R_BLOCK: tl.constexpr, H_BLOCK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Rotate one token's heads in place."""
    head = tl.arange(0, H_BLOCK)
    half = tl.arange(0, R_BLOCK)
    mask = (head < heads)[:, None] & (half < R)[None, :]
    start = x + token * stride_t + head[:, None] * stride_h
    first = tl.load(start + half[None, :], mask=mask, other=0.0)
    second = tl.load(start + R + half[None, :], mask=mask, other=0.0)
    if NORM:
        columns = tl.arange(0, D_BLOCK)
        whole_mask = (head < heads)[:, None] & (columns < D)[None, :]
        whole = tl.load(start + columns[None, :], mask=whole_mask, other=0.0)
        wide = whole.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)[:, None]
        first_gain = tl.load(weight + half, mask=half < R, other=0.0)[None, :]
        second_gain = tl.load(weight + R + half, mask=half < R, other=0.0)[None, :]
        first = _gain(first.to(tl.float32) * scale, first_gain)
        second = _gain(second.to(tl.float32) * scale, second_gain)
        if 2 * R < D:
            gain = tl.load(weight + columns, mask=columns < D, other=0.0)[None, :]
            tl.store(start + columns[None, :], _gain(wide * scale, gain), mask=whole_mask & (columns >= 2 * R)[None, :])
    c = tl.load(cos + token * R + half, mask=half < R, other=0.0)[None, :].to(tl.float32)
    s = tl.load(sin + token * R + half, mask=half < R, other=0.0)[None, :].to(tl.float32)
    a, b = first.to(tl.float32), second.to(tl.float32)
    tl.store(start + half[None, :], (a * c - b * s).to(first.dtype), mask=mask)
    tl.store(start + R + half[None, :], (b * c + a * s).to(first.dtype), mask=mask)


@triton.jit
def _rotary(
    q, k, q_stride_t, q_stride_h, k_stride_t, k_stride_h, cos, sin, q_weight, k_weight, eps, q_heads, k_heads,
    D: tl.constexpr, R: tl.constexpr, D_BLOCK: tl.constexpr, R_BLOCK: tl.constexpr,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        _heads(
            q, q_stride_t, q_stride_h, token, cos, sin, q_weight, eps, q_heads, D, R, D_BLOCK, R_BLOCK, Q_BLOCK, NORM
        )
    else:
        _heads(
            k, k_stride_t, k_stride_h, token, cos, sin, k_weight, eps, k_heads, D, R, D_BLOCK, R_BLOCK, K_BLOCK, NORM
        )


def rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q [T, Hq, D] and k [T, Hkv, D] in place; cos and sin are contiguous [T, R].

    With `weights` (of q and k, [D] each), every head is normalised first.
    """
    if len(q):
        size, half = q.shape[-1], cos.shape[-1]
        q_weight, k_weight = weights or (q, q)
        _rotary[(len(q), 2)](
            q, k, q.stride(0), q.stride(1), k.stride(0), k.stride(1), cos, sin, q_weight, k_weight, eps,
            q.shape[1], k.shape[1], D=size, R=half,
            D_BLOCK=triton.next_power_of_2(size), R_BLOCK=triton.next_power_of_2(half),
            Q_BLOCK=triton.next_power_of_2(q.shape[1]), K_BLOCK=triton.next_power_of_2(k.shape[1]),
            NORM=weights is not None, num_warps=4,
        )  # fmt: skip
    return q, k
