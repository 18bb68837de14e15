"""The two grouped GEMMs of gated experts whose weights are a `PackedMatrix`. Imports triton.

Shape legend: T tokens, top_k experts per token, R = T * top_k rows, E experts, N outputs, K inputs. Each program computes one
block of rows, which belong to one expert, and one block of outputs.
"""

import torch
import triton
import triton.language as tl

from minisgl_backends.kernels.packed_gemm import constants, packed_dot
from minisgl_backends.kernels.packed_matrix import TILE, PackedMatrix
from minisgl_backends.kernels.packed_tiling import choose_stages
from minisgl_backends.moe.sorted_blocks import SortedBlocks
from minisgl_backends.moe.triton_grouped import activated

_COLS = 64
"""Outputs per program."""


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _packed_grouped_gemm(  # type: ignore[no-untyped-def]
    x, codes, high, words, superblocks, row_weights, out, block_rows, block_experts, num_rows, num_experts, N, K, half, chunks,
    words_stride, out_stride, TOP_K: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, SUB: tl.constexpr, BLOCK: tl.constexpr, WORD: tl.constexpr, ZERO: tl.constexpr,
    PARTS: tl.constexpr, HAS_SUPERBLOCKS: tl.constexpr, GATED: tl.constexpr, HAS_WEIGHTS: tl.constexpr, EVEN: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute a block of outputs; with GATED, each expert's rows `half` and on are its up rows, and the activation is fused.

    `half` counts the stored rows of one projection of an expert. `constants` describes KIND and the other compile-time arguments.
    """
    block = tl.program_id(0)
    expert = tl.load(block_experts + block)
    if expert >= num_experts:
        return
    row = tl.load(block_rows + block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    row_mask, col_mask = row < num_rows, col < N
    stored_row = expert * (1 + GATED) * half + tl.minimum(col, half - 1)
    result, up = packed_dot(
        x + row // TOP_K * K, row_mask, codes, high, words, superblocks, stored_row, half, K, 0, chunks, chunks, words_stride,
        COLS, ROWS, KIND, LOW, HIGH, SUB, BLOCK, WORD, ZERO, PARTS, HAS_SUPERBLOCKS, GATED, EVEN, WIDEN, False,
    )  # fmt: skip
    if GATED:
        result = activated(result, up, "silu", None)
    if HAS_WEIGHTS:
        result *= tl.load(row_weights + row, mask=row_mask, other=0.0)[None, :]
    to = out + row[None, :] * out_stride + col[:, None]
    tl.store(to, result.to(out.dtype.element_ty), mask=row_mask[None, :] & col_mask[:, None])


def packed_grouped_gemm(
    x: torch.Tensor,
    weight: PackedMatrix,
    out: torch.Tensor,
    blocks: SortedBlocks,
    *,
    top_k: int = 1,
    row_weights: torch.Tensor | None = None,
) -> None:
    """Compute ``out[row] = row_weights[row] * (weight @ x[row // top_k])`` for every row, or ``silu(gate) * up``.

    Args:
        x: [R / top_k, K], contiguous.
        weight: rows of all experts. Those of each expert begin at a tile; if the weight is gated, its up rows do, too.
        out: [R, N]; rows may be strided.
        blocks: rows by expert.
        top_k: rows per row of x.
        row_weights: float32 [R], or None.
    """
    packing, num_outputs = weight.packing, out.shape[1]
    tiles = triton.cdiv(num_outputs, TILE)
    grid = len(blocks.experts), triton.cdiv(num_outputs, _COLS)
    _packed_grouped_gemm[grid](
        x, weight.codes, weight.codes if weight.high is None else weight.high, weight.words,
        weight.words if weight.superblocks is None else weight.superblocks, out if row_weights is None else row_weights, out,
        blocks.rows, blocks.experts, len(out), len(weight.codes) // (tiles * (1 + weight.gated)), num_outputs, weight.num_inputs,
        tiles * TILE, weight.chunks, weight.words.stride(0), out.stride(0), TOP_K=top_k, COLS=_COLS,
        ROWS=blocks.block_size, GATED=weight.gated, HAS_WEIGHTS=row_weights is not None,
        EVEN=weight.num_inputs == weight.chunks * packing.chunk, WIDEN=not x.is_cuda,
        num_warps=8 if blocks.block_size == 128 else 4, num_stages=choose_stages(_COLS, blocks.block_size, weight),
        **constants(packing),
    )  # fmt: skip
