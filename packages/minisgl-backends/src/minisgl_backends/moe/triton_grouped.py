"""The grouped GEMM of a gated expert layer, which computes the gate-up and the down projection. Imports triton.

Shape legend: T tokens, top_k experts per token, R = T * top_k rows, E experts, N outputs, K inputs, H hidden size. With packed
weights, G groups of inputs have a scale each. Each program computes one block of rows, which belong to one expert, and one block
of outputs.
"""

import torch
import triton
import triton.language as tl

from minisgl_backends.kernels.activation import gelu_tanh, silu
from minisgl_backends.kernels.dequantize_bytes import dequantize_int4_bytes, dequantize_mxfp4_bytes
from minisgl_backends.kernels.dot import add_dot
from minisgl_backends.moe.sorted_blocks import SortedBlocks
from minisgl_backends.moe.tiles import Tiles


@triton.jit  # type: ignore[untyped-decorator]
def _load(pointers, outer, inner, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    if EVEN:  # the tiles divide the inner dimension
        return tl.load(pointers, mask=outer, other=0.0)
    return tl.load(pointers, mask=outer & inner, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _dequantize(  # type: ignore[no-untyped-def]
    codes, scales, zeros, row, mask, row_bytes, start, GROUP_SIZE: tl.constexpr, DEPTH: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """Return some rows of a packed weight for the inputs from `start`, [DEPTH, rows]. GROUP_SIZE inputs share a scale."""
    byte = start // 2 + tl.arange(0, DEPTH // 2)
    packed = tl.load(codes + row[:, None] * row_bytes + byte[None, :], mask=mask[:, None], other=0)
    scale_index = row * (2 * row_bytes // GROUP_SIZE) + start // GROUP_SIZE
    scale = tl.load(scales + scale_index, mask=mask, other=0)
    if scales.dtype.element_ty == tl.uint8:
        out = dequantize_mxfp4_bytes(packed, scale, dtype)
    else:
        zero = tl.full(row.shape, 8, tl.float32)
        if zeros is not None:
            zero = tl.load(zeros + scale_index, mask=mask, other=0).to(tl.float32)
        out = dequantize_int4_bytes(packed, scale, zero, dtype)
    return tl.trans(out)


@triton.jit  # type: ignore[untyped-decorator]
def activated(gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Clamp gate and up to LIMIT, and apply the activation; see `MoeSpec.activation`."""
    if LIMIT is not None:  # comparisons that let NaN through
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if ACTIVATION == "swigluoai":
        result = gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
    elif ACTIVATION == "gelu_tanh":
        result = gelu_tanh(gate) * up
    else:
        tl.static_assert(ACTIVATION == "silu")
        result = silu(gate) * up
    return result


@triton.jit  # type: ignore[untyped-decorator]
def _load_weights(  # type: ignore[no-untyped-def]
    weights, scales, zeros, first, col, mask, K, row_bytes, start,
    GROUP_SIZE: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Return the weights of rows ``first + col`` for the inputs from `start`, [DEPTH, cols]."""
    if GROUP_SIZE > 0:
        out = _dequantize(weights, scales, zeros, first + col, mask, row_bytes, start, GROUP_SIZE, DEPTH, dtype)
    else:
        depth = start + tl.arange(0, DEPTH)
        rows = weights + first * K + col[None, :] * K
        out = _load(rows + depth[:, None], mask[None, :], (depth < K)[:, None], EVEN)
    return out


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _grouped_gemm(  # type: ignore[no-untyped-def]
    x,  # [R / TOP_K, K]
    x_scales,  # [R / TOP_K], float32
    weights,  # [E, rows, K]; rows is N, or with an activation 2 * N, gate above up
    scales,  # [E, rows], float32, or per group: [E, rows, G]
    zeros,  # [E, rows, G], uint8
    bias,  # [E, rows]
    row_weights,  # [R], float32
    out,  # [R, N]
    block_rows,
    block_experts,
    num_rows,
    num_experts,
    N,
    K,
    row_bytes,  # bytes per row of packed weights
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP_SIZE: tl.constexpr,  # inputs per scale of packed weights; 0 for other weights
):
    """Compute a block of outputs; with ACTIVATION, rows N and on of each expert are its up rows."""
    GATED: tl.constexpr = ACTIVATION is not None
    block = tl.program_id(0)
    expert = tl.load(block_experts + block).to(tl.int64)
    if expert >= num_experts:
        return
    row = tl.load(block_rows + block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    col = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    row_mask, col_mask = row < num_rows, col < N
    x_rows = x + (row // TOP_K)[:, None] * K
    first = expert * (1 + GATED) * N
    result = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype=tl.float32)
    up = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype=tl.float32)
    for start in range(0, K, BLOCK_DEPTH):
        depth = start + tl.arange(0, BLOCK_DEPTH)
        x_tile = _load(x_rows + depth[None, :], row_mask[:, None], (depth < K)[None, :], EVEN)
        w = _load_weights(
            weights, scales, zeros, first, col, col_mask, K, row_bytes, start, GROUP_SIZE, BLOCK_DEPTH, EVEN, x_tile.dtype
        )  # fmt: skip
        if GATED:
            up_w = _load_weights(
                weights, scales, zeros, first + N, col, col_mask, K, row_bytes, start, GROUP_SIZE, BLOCK_DEPTH, EVEN, x_tile.dtype
            )  # fmt: skip
        result = add_dot(result, x_tile, w, WIDEN)
        if GATED:
            up = add_dot(up, x_tile, up_w, WIDEN)
    if x_scales is not None:
        row_scales = tl.load(x_scales + row // TOP_K, mask=row_mask, other=0.0)[:, None]
        result *= row_scales * tl.load(scales + first + col, mask=col_mask, other=0.0)[None, :]
        if GATED:
            up *= row_scales * tl.load(scales + first + N + col, mask=col_mask, other=0.0)[None, :]
    if bias is not None:
        result += tl.load(bias + first + col, mask=col_mask, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias + first + N + col, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    if GATED:
        result = activated(result, up, ACTIVATION, LIMIT)
    if row_weights is not None:
        result *= tl.load(row_weights + row, mask=row_mask, other=0.0)[:, None]
    out_rows = out + row[:, None] * N
    tl.store(out_rows + col[None, :], result.to(out.dtype.element_ty), mask=row_mask[:, None] & col_mask[None, :])


def grouped_gemm(
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    weights: torch.Tensor,
    scales: torch.Tensor | None,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    blocks: SortedBlocks,
    tiles: Tiles,
    *,
    top_k: int = 1,
    row_weights: torch.Tensor | None = None,
    activation: str | None = None,
    limit: float | None = None,
) -> None:
    """Compute ``out[row] = row_weights[row] * (w @ x[row // top_k] + bias)``, or ``activation(gate, up)``, for every row.

    ``w`` and ``bias`` are those of the row's expert.

    Args:
        x: [R / top_k, K].
        x_scales: scales of its rows, float32 [R / top_k], if it is float8.
        weights: [E, N, K], or with an activation [E, 2 * N, K]; or packed.
        scales: scales of `weights` if they are quantized; see `ExpertWeights`.
        zeros: their zero points, or None.
        bias: one per row of `weights`, or None.
        out: [R, N].
        blocks: rows by expert.
        tiles: tile sizes of the GEMM.
        top_k: rows per row of x.
        row_weights: float32 [R], or None.
        activation: see `MoeSpec.activation`; None for a projection without one.
        limit: see `MoeSpec.swiglu_limit`.
    """
    (num_experts, _, row_bytes), num_inputs = weights.shape, x.shape[1]
    is_packed = weights.dtype == torch.uint8
    group_size = 2 * row_bytes // scales.shape[2] if is_packed and scales is not None else 0
    depth = next(size for size in (128, 64, 32) if group_size % size == 0) if is_packed else tiles.depth
    _grouped_gemm[len(blocks.experts), triton.cdiv(out.shape[1], tiles.cols)](
        x, x_scales, weights, scales, zeros, bias, row_weights, out, blocks.rows, blocks.experts, len(out), num_experts,
        out.shape[1], num_inputs, row_bytes, TOP_K=top_k, ACTIVATION=activation, LIMIT=limit, BLOCK_ROWS=blocks.block_size,
        BLOCK_COLS=tiles.cols, BLOCK_DEPTH=depth, EVEN=num_inputs % depth == 0, GROUP_SIZE=group_size,
        WIDEN=not x.is_cuda,  # Triton's interpreter multiplies the bits of bfloat16 as integers
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _sum_experts(  # type: ignore[no-untyped-def]
    rows, out, hidden_size, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        row = rows + (token * TOP_K + choice) * hidden_size
        total += tl.load(row + cols, mask=cols < hidden_size, other=0.0).to(tl.float32)
    tl.store(out + token * hidden_size + cols, total.to(out.dtype.element_ty), mask=cols < hidden_size)


def sum_experts(rows: torch.Tensor, out: torch.Tensor) -> None:
    """Write the float32 sum of each token's rows to ``out[token]``.

    Args:
        rows: [R, H].
        out: [T, H].
    """
    num_tokens, hidden_size = out.shape
    if num_tokens == 0:
        return
    block = min(triton.next_power_of_2(hidden_size), 1024)
    grid = (num_tokens, triton.cdiv(hidden_size, block))
    _sum_experts[grid](rows, out, hidden_size, TOP_K=len(rows) // num_tokens, BLOCK=block)
