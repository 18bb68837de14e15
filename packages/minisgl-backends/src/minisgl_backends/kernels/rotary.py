"""RoPE of queries and keys, fused with the QK norm before it and the KV store after it.

Shape legend: T tokens, Hq and Hkv heads, D head dimension, R half of the rotated dimensions, P pages of S tokens.
"""

import torch
import triton
import triton.language as tl

from minisgl_backends.kernels.dependent_launch import await_previous, launch_options
from minisgl_backends.kernels.fp8 import to_pool_dtype
from minisgl_core.contracts.ops import Rope

_HEADS, _WARPS = 8, 4
"""Heads of one token and warps per program: few enough that many programs fit on an SM."""


@triton.jit
def _times_weight(normed, weight):
    """Round to the model's dtype, then multiply in it."""
    return (normed.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(weight.dtype)


@triton.jit
def _rotate_heads(
    x, stride_h, out, out_stride_h, out_scale, cos, sin, weight, eps, head, heads,
    D: tl.constexpr, R: tl.constexpr, D_BLOCK: tl.constexpr, R_BLOCK: tl.constexpr, NORM: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """Apply the QK norm and RoPE to heads of a token."""
    half = tl.arange(0, R_BLOCK)
    mask = (head < heads)[:, None] & (half < R)[None, :]
    start, to = x + head[:, None] * stride_h, out + head[:, None] * out_stride_h
    columns = tl.arange(0, D_BLOCK)
    whole_mask = (head < heads)[:, None] & (columns < D)[None, :]
    first = tl.load(start + half[None, :], mask=mask, other=0.0)
    second = tl.load(start + R + half[None, :], mask=mask, other=0.0)
    if NORM:
        whole = tl.load(start + columns[None, :], mask=whole_mask, other=0.0)
        wide = whole.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)[:, None]
        first_weight = tl.load(weight + half, mask=half < R, other=0.0)[None, :]
        second_weight = tl.load(weight + R + half, mask=half < R, other=0.0)[None, :]
        first = _times_weight(first.to(tl.float32) * scale, first_weight)
        second = _times_weight(second.to(tl.float32) * scale, second_weight)
        if 2 * R < D:
            whole_weight = tl.load(weight + columns, mask=columns < D, other=0.0)[None, :]
            rest = _times_weight(wide * scale, whole_weight)
            tl.store(
                to + columns[None, :],
                to_pool_dtype(rest, out_scale, out),
                mask=whole_mask & (columns >= 2 * R)[None, :],
            )
    elif 2 * R < D and not IN_PLACE:
        rest = tl.load(start + columns[None, :], mask=whole_mask, other=0.0)
        tl.store(
            to + columns[None, :], to_pool_dtype(rest, out_scale, out), mask=whole_mask & (columns >= 2 * R)[None, :]
        )
    c = tl.load(cos + half, mask=half < R, other=0.0)[None, :].to(tl.float32)
    s = tl.load(sin + half, mask=half < R, other=0.0)[None, :].to(tl.float32)
    a, b = first.to(tl.float32), second.to(tl.float32)
    tl.store(to + half[None, :], to_pool_dtype((a * c - b * s).to(first.dtype), out_scale, out), mask=mask)
    tl.store(to + R + half[None, :], to_pool_dtype((b * c + a * s).to(first.dtype), out_scale, out), mask=mask)


@triton.jit
def _qk_norm_rope(
    q, k, v, q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h, cos, sin, q_weight, k_weight, eps,
    k_pool, v_pool, slots, k_scale, v_scale, q_heads, k_heads,
    D: tl.constexpr, R: tl.constexpr, D_BLOCK: tl.constexpr, R_BLOCK: tl.constexpr, H_BLOCK: tl.constexpr,
    NORM: tl.constexpr, STORE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Apply the QK norm and RoPE to H_BLOCK heads of a token per program: first those of q, then those of k.

    With STORE, k is written to its slot instead of in place, and further programs store v.
    """
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q_blocks, k_blocks = tl.cdiv(q_heads, H_BLOCK), tl.cdiv(k_heads, H_BLOCK)
    cos += token * R
    sin += token * R
    await_previous(PDL)
    if block < q_blocks:
        q += token * q_stride_t
        head = block * H_BLOCK + tl.arange(0, H_BLOCK)
        _rotate_heads(
            q, q_stride_h, q, q_stride_h, 1.0, cos, sin, q_weight, eps, head, q_heads, D, R, D_BLOCK, R_BLOCK, NORM, True
        )  # fmt: skip
    elif block < q_blocks + k_blocks:
        k += token * k_stride_t
        head = (block - q_blocks) * H_BLOCK + tl.arange(0, H_BLOCK)
        if STORE:
            to = k_pool + tl.load(slots + token) * k_heads * D
            _rotate_heads(
                k, k_stride_h, to, D, k_scale, cos, sin, k_weight, eps, head, k_heads, D, R, D_BLOCK, R_BLOCK, NORM, False
            )  # fmt: skip
        else:
            _rotate_heads(
                k, k_stride_h, k, k_stride_h, 1.0, cos, sin, k_weight, eps, head, k_heads, D, R, D_BLOCK, R_BLOCK, NORM, True
            )  # fmt: skip
    elif STORE:
        head = (block - q_blocks - k_blocks) * H_BLOCK + tl.arange(0, H_BLOCK)
        column = tl.arange(0, D_BLOCK)[None, :]
        mask = (head < k_heads)[:, None] & (column < D)
        values = tl.load(v + token * v_stride_t + head[:, None] * v_stride_h + column, mask=mask, other=0.0)
        tl.store(
            v_pool + tl.load(slots + token) * k_heads * D + head[:, None] * D + column,
            to_pool_dtype(values, v_scale, v_pool),
            mask=mask,
        )


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    rope: Rope,
    store: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
    *,
    pdl: bool = False,
) -> None:
    """Apply the QK norm and RoPE to q and k in place; with `store`, write k and v to the KV pool instead.

    Args:
        q: [T, Hq, D], contiguous in the last dimension.
        k: [T, Hkv, D], like q.
        rope: cos and sin of the tokens' positions, and the QK norm.
        store: v [T, Hkv, D]; K and V of a layer, [P, S, Hkv, D], contiguous; the slot of each token, int64 [T].
        scales: scales of k and v in FP8 pages; see `AttentionLayer.kv_scales`.
        pdl: launch with PDL; see `dependent_launch`.
    """
    if not len(q):
        return
    size, half = q.shape[-1], rope.cos.shape[-1]
    # Arguments that the kernel does not read still need a tensor: q or k stands in for them.
    q_weight, k_weight = rope.norms or (q, q)
    v, k_pages, v_pages, slots = store or (k, k, k, k)
    block = min(_HEADS, triton.next_power_of_2(max(q.shape[1], k.shape[1])))
    q_blocks, k_blocks = triton.cdiv(q.shape[1], block), triton.cdiv(k.shape[1], block)
    _qk_norm_rope[(len(q), q_blocks + (k_blocks if store is None else 2 * k_blocks))](
        q, k, v, q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        rope.cos.contiguous(), rope.sin.contiguous(), q_weight, k_weight, rope.eps, k_pages, v_pages, slots, *scales,
        q.shape[1], k.shape[1],
        D=size, R=half, D_BLOCK=triton.next_power_of_2(size), R_BLOCK=triton.next_power_of_2(half), H_BLOCK=block,
        NORM=rope.norms is not None, STORE=store is not None, num_warps=_WARPS,
        **launch_options(pdl),
    )  # fmt: skip
