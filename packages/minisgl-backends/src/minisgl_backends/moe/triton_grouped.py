"""The two grouped GEMMs of a gated expert layer. Imports triton.

Shape legend: T tokens, K experts per token, R = T * K rows, E experts, H hidden size, I intermediate size. With packed
weights, G groups of inputs have a scale each. Each program computes one block of rows, which belong to one expert, and one block
of output columns.
"""

import torch
import triton
import triton.language as tl

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
    codes, scales, zeros, row, mask, row_bytes, start,
    GROUP_SIZE: tl.constexpr, DEPTH: tl.constexpr, HAS_ZEROS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Return some rows of a packed weight for the inputs from `start`, [DEPTH, rows]. GROUP_SIZE inputs share a scale."""
    byte = start // 2 + tl.arange(0, DEPTH // 2)
    packed = tl.load(codes + row[:, None] * row_bytes + byte[None, :], mask=mask[:, None], other=0)
    code = tl.interleave(packed & 15, packed >> 4).to(tl.int32)
    scale_index = row * (2 * row_bytes // GROUP_SIZE) + start // GROUP_SIZE
    scale = tl.load(scales + scale_index, mask=mask, other=0)
    if scales.dtype.element_ty == tl.uint8:  # MXFP4
        exponent = (code >> 1) & 3
        size = tl.where(exponent == 0, (code & 1) * 0.5, (2 + (code & 1)) * (1 << exponent) * 0.25)
        value = tl.where(code > 7, -size, size)
        bits = scale.to(tl.int32)
        bits = tl.where(
            bits == 0, 1 << 22, tl.where(bits == 255, 0x7FC00000, bits << 23)
        )  # 2^-127 is subnormal; 255 is NaN
        factor = bits.to(tl.float32, bitcast=True)
    else:
        zero = tl.full(code.shape, 8, tl.int32)
        if HAS_ZEROS:
            zero = tl.load(zeros + scale_index, mask=mask, other=0).to(tl.int32)[:, None]
        value = (code - zero).to(tl.float32)
        factor = scale.to(tl.float32)
    return tl.trans((value * factor[:, None]).to(dtype))


@triton.jit  # type: ignore[untyped-decorator]
def activated(gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Clamp gate and up to LIMIT, and apply the activation; see `MoeSpec.activation`."""
    if LIMIT is not None:  # comparisons that let NaN through
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if ACTIVATION == "swigluoai":
        result = gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
    elif ACTIVATION == "gelu_tanh":  # 1 + tanh(y) = 2 * sigmoid(2 * y), y = sqrt(2 / pi) * (gate + 0.044715 * gate**3)
        result = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        tl.static_assert(ACTIVATION == "silu")
        result = gate * tl.sigmoid(gate) * up
    return result


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _gate_up_activation(  # type: ignore[no-untyped-def]
    x,  # [T, H]
    x_scales,  # [T], float32
    weights,  # [E, 2 * I, H], gate above up
    scales,  # [E, 2 * I], float32, or of groups: [E, 2 * I, G]
    zeros,  # [E, 2 * I, G], uint8
    bias,  # [E, 2 * I]
    out,  # [R, I]
    block_rows,
    block_experts,
    num_rows,
    num_experts,
    hidden_size,
    intermediate_size,
    row_bytes,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP_SIZE: tl.constexpr,  # inputs per scale of packed weights; 0 for other weights
    HAS_ZEROS: tl.constexpr,
):
    block = tl.program_id(0)
    expert = tl.load(block_experts + block).to(tl.int64)
    if expert >= num_experts:
        return
    rows = tl.load(block_rows + block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    row_mask, col_mask = rows < num_rows, cols < intermediate_size
    x_rows = x + (rows // TOP_K)[:, None] * hidden_size
    gate_cols = weights + expert * 2 * intermediate_size * hidden_size + cols[None, :] * hidden_size
    up_cols = gate_cols + intermediate_size * hidden_size
    gate = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype=tl.float32)
    up = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype=tl.float32)
    for start in range(0, hidden_size, BLOCK_DEPTH):
        depth = start + tl.arange(0, BLOCK_DEPTH)
        in_depth = depth < hidden_size
        x_tile = _load(x_rows + depth[None, :], row_mask[:, None], in_depth[None, :], EVEN)
        if GROUP_SIZE > 0:
            row = expert * 2 * intermediate_size + cols
            gate_w = _dequantize(
                weights, scales, zeros, row, col_mask, row_bytes, start, GROUP_SIZE, BLOCK_DEPTH, HAS_ZEROS, x_tile.dtype
            )  # fmt: skip
            up_w = _dequantize(
                weights, scales, zeros, row + intermediate_size, col_mask, row_bytes, start, GROUP_SIZE, BLOCK_DEPTH,
                HAS_ZEROS, x_tile.dtype,
            )  # fmt: skip
        else:
            gate_w = _load(gate_cols + depth[:, None], col_mask[None, :], in_depth[:, None], EVEN)
            up_w = _load(up_cols + depth[:, None], col_mask[None, :], in_depth[:, None], EVEN)
        gate, up = add_dot(gate, x_tile, gate_w, WIDEN), add_dot(up, x_tile, up_w, WIDEN)
    if SCALED:
        row_scales = tl.load(x_scales + rows // TOP_K, mask=row_mask, other=0.0)[:, None]
        col_scales = scales + expert * 2 * intermediate_size + cols
        gate *= row_scales * tl.load(col_scales, mask=col_mask, other=0.0)[None, :]
        up *= row_scales * tl.load(col_scales + intermediate_size, mask=col_mask, other=0.0)[None, :]
    if HAS_BIAS:
        col_bias = bias + expert * 2 * intermediate_size + cols
        gate += tl.load(col_bias, mask=col_mask, other=0.0).to(tl.float32)[None, :]
        up += tl.load(col_bias + intermediate_size, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    result = activated(gate, up, ACTIVATION, LIMIT)
    out_rows = out + rows[:, None] * intermediate_size
    tl.store(out_rows + cols[None, :], result.to(out.dtype.element_ty), mask=row_mask[:, None] & col_mask[None, :])


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _weighted_down(  # type: ignore[no-untyped-def]
    intermediate,  # [R, I]
    intermediate_scales,  # [R], float32
    weights,  # [E, H, I]
    scales,  # [E, H], float32, or of groups: [E, H, G]
    zeros,  # [E, H, G], uint8
    bias,  # [E, H]
    row_weights,  # [R], float32
    out,  # [R, H]
    block_rows,
    block_experts,
    num_rows,
    num_experts,
    hidden_size,
    intermediate_size,
    row_bytes,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP_SIZE: tl.constexpr,  # inputs per scale of packed weights; 0 for other weights
    HAS_ZEROS: tl.constexpr,
):
    block = tl.program_id(0)
    expert = tl.load(block_experts + block).to(tl.int64)
    if expert >= num_experts:
        return
    rows = tl.load(block_rows + block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    row_mask, col_mask = rows < num_rows, cols < hidden_size
    intermediate_rows = intermediate + rows[:, None] * intermediate_size
    weight_cols = weights + expert * hidden_size * intermediate_size + cols[None, :] * intermediate_size
    result = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype=tl.float32)
    for start in range(0, intermediate_size, BLOCK_DEPTH):
        depth = start + tl.arange(0, BLOCK_DEPTH)
        in_depth = depth < intermediate_size
        x_tile = _load(intermediate_rows + depth[None, :], row_mask[:, None], in_depth[None, :], EVEN)
        if GROUP_SIZE > 0:
            row = expert * hidden_size + cols
            w = _dequantize(
                weights, scales, zeros, row, col_mask, row_bytes, start, GROUP_SIZE, BLOCK_DEPTH, HAS_ZEROS, x_tile.dtype
            )  # fmt: skip
        else:
            w = _load(weight_cols + depth[:, None], col_mask[None, :], in_depth[:, None], EVEN)
        result = add_dot(result, x_tile, w, WIDEN)
    if SCALED:
        row_scales = tl.load(intermediate_scales + rows, mask=row_mask, other=0.0)[:, None]
        result *= row_scales * tl.load(scales + expert * hidden_size + cols, mask=col_mask, other=0.0)[None, :]
    if HAS_BIAS:
        result += tl.load(bias + expert * hidden_size + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    result *= tl.load(row_weights + rows, mask=row_mask, other=0.0)[:, None]
    out_rows = out + rows[:, None] * hidden_size
    tl.store(out_rows + cols[None, :], result.to(out.dtype.element_ty), mask=row_mask[:, None] & col_mask[None, :])


def gate_up_activation(
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    gate_up: torch.Tensor,
    scales: torch.Tensor | None,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    blocks: SortedBlocks,
    top_k: int,
    tiles: Tiles,
    activation: str = "silu",
    limit: float | None = None,
) -> None:
    """Compute ``out[row] = activation(gate @ x[token], up @ x[token])`` for every row.

    Args:
        x: [T, H].
        x_scales: scales of the tokens, float32 [T], if `x` is float8.
        gate_up: [E, 2 * I, H], or packed.
        scales: scales of `gate_up` if it is quantized; see `ExpertWeights`.
        zeros: its zero points, or None.
        bias: [E, 2 * I], or None.
        out: [R, I].
        blocks: rows by expert.
        top_k: K.
        tiles: tile sizes of the GEMM.
        activation: see `MoeSpec.activation`.
        limit: see `MoeSpec.swiglu_limit`.
    """
    num_experts, _, row_bytes = gate_up.shape
    hidden_size = x.shape[1]
    grid = (len(blocks.experts), triton.cdiv(out.shape[1], tiles.cols))
    sizes = (out.shape[0], num_experts, hidden_size, out.shape[1], row_bytes)
    options = _options(x, gate_up, scales, zeros, bias, blocks, tiles)
    left = x, x if x_scales is None else x_scales
    right = gate_up, *(gate_up if each is None else each for each in (scales, zeros, bias))
    options |= {"TOP_K": top_k, "ACTIVATION": activation, "LIMIT": limit}
    _gate_up_activation[grid](*left, *right, out, blocks.rows, blocks.experts, *sizes, **options)


def weighted_down(
    intermediate: torch.Tensor,
    intermediate_scales: torch.Tensor | None,
    down: torch.Tensor,
    scales: torch.Tensor | None,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    row_weights: torch.Tensor,
    out: torch.Tensor,
    blocks: SortedBlocks,
    tiles: Tiles,
) -> None:
    """Compute ``out[row] = row_weights[row] * (down @ intermediate[row] + bias)`` for every row.

    Args:
        intermediate: [R, I].
        intermediate_scales: scales of its rows, float32 [R], if it is float8.
        down: [E, H, I], or packed.
        scales: scales of `down` if it is quantized; see `ExpertWeights`.
        zeros: its zero points, or None.
        bias: [E, H], or None.
        row_weights: float32 [R].
        out: [R, H].
        blocks: rows by expert.
        tiles: tile sizes of the GEMM.
    """
    num_experts, hidden_size, row_bytes = down.shape
    grid = (len(blocks.experts), triton.cdiv(hidden_size, tiles.cols))
    sizes = (out.shape[0], num_experts, hidden_size, intermediate.shape[1], row_bytes)
    options = _options(intermediate, down, scales, zeros, bias, blocks, tiles)
    left = intermediate, intermediate if intermediate_scales is None else intermediate_scales
    right = down, *(down if each is None else each for each in (scales, zeros, bias))
    _weighted_down[grid](*left, *right, row_weights, out, blocks.rows, blocks.experts, *sizes, **options)


def _options(
    x: torch.Tensor,
    weights: torch.Tensor,
    scales: torch.Tensor | None,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    blocks: SortedBlocks,
    tiles: Tiles,
) -> dict[str, str | float | bool | None]:
    is_packed = weights.dtype == torch.uint8
    group_size = 2 * weights.shape[2] // scales.shape[2] if is_packed and scales is not None else 0
    depth = next(size for size in (128, 64, 32) if group_size % size == 0) if is_packed else tiles.depth
    return {
        "BLOCK_ROWS": blocks.block_size,
        "BLOCK_COLS": tiles.cols,
        "BLOCK_DEPTH": depth,
        "WIDEN": not x.is_cuda,  # Triton's interpreter multiplies the bits of bfloat16 as integers
        "SCALED": scales is not None and not is_packed,
        "GROUP_SIZE": group_size,
        "HAS_ZEROS": zeros is not None,
        "HAS_BIAS": bias is not None,
        "EVEN": x.shape[1] % depth == 0,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


@triton.jit  # type: ignore[untyped-decorator]
def _sum_choices(  # type: ignore[no-untyped-def]
    rows, out, hidden_size, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        row = rows + (token * TOP_K + choice) * hidden_size
        total += tl.load(row + cols, mask=cols < hidden_size, other=0.0).to(tl.float32)
    tl.store(out + token * hidden_size + cols, total.to(out.dtype.element_ty), mask=cols < hidden_size)


def sum_choices(rows: torch.Tensor, out: torch.Tensor) -> None:
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
    _sum_choices[grid](rows, out, hidden_size, TOP_K=len(rows) // num_tokens, BLOCK=block)
