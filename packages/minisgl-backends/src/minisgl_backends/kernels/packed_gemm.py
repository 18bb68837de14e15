"""GEMM of 16-bit activations and packed weights, which are dequantized in registers.

A program computes a block of outputs for a block of rows. The dequantized codes are the left operand of the tensor cores, which
is read from registers, and the rows of x are the right one. K may be split: the last program of a block to arrive reduces the
partial sums.

Shape legend: M rows, N outputs, K inputs; the weight as `minisgl_backends.kernels.packed_matrix` describes it.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from minisgl_backends.kernels.activation import silu_and_mul, silu_and_mul_in
from minisgl_backends.kernels.dependent_launch import await_previous, launch_options
from minisgl_backends.kernels.dequantize import dequantize, dequantize_int4, scale_and_offset
from minisgl_backends.kernels.device import has_dependent_launch
from minisgl_backends.kernels.dot import add_dot
from minisgl_backends.kernels.packed_matrix import TILE, PackedMatrix, Packing, TiledWeight
from minisgl_backends.kernels.packed_tiling import PackedTiling, choose_tiling
from minisgl_backends.kernels.split_k import SplitKWorkspace

_WEIGHTS_PER_PANEL = 1 << 25
"""Number of weights that are dequantized at once, if x has more than `MAX_FUSED_ROWS` rows."""
_GATHERED_ROWS = 8
"""Rows of an embedding per program."""


@triton.jit
def _dequantize_part(
    codes, high, word, superblock, PART: tl.constexpr, KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    FIELD: tl.constexpr, ZERO: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Return part PART of a chunk in `dtype`; FIELD is the field of the word with its scale."""
    if KIND == "int4":
        out = dequantize_int4(codes, word, PART, dtype)
    else:
        scale, offset = scale_and_offset(word, superblock, FIELD, KIND, LOW, ZERO)
        out = dequantize(codes, high, scale, offset, PART, LOW, HIGH, dtype)
    return out


@triton.jit
def packed_dot(
    rows, row_mask, codes, high, words, superblocks, stored_row, half, K, first, last, chunks, words_stride, COLS: tl.constexpr,
    ROWS: tl.constexpr, KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SUB: tl.constexpr, BLOCK: tl.constexpr,
    WORD: tl.constexpr, ZERO: tl.constexpr, PARTS: tl.constexpr, HAS_SUPERBLOCKS: tl.constexpr, GATED: tl.constexpr,
    EVEN: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply some outputs' weights by rows of x, over the chunks from `first` to `last`. A chunk has PARTS parts of SUB inputs.

    Args:
        rows: pointers to the rows of x, [ROWS].
        row_mask: True for rows that exist, [ROWS].
        stored_row: stored row of each output, see `TiledWeight.rows_of`, [COLS].
        half: number of stored rows of the gate, and so the distance from a gate row to its up row; without GATED, of all rows.

    Returns:
        The sums of the outputs, or of the gate if GATED, and those of up: float32 [COLS, ROWS].
    """
    CHUNK: tl.constexpr = PARTS * SUB
    PER_CODE: tl.constexpr = 16 // LOW  # parts per int16 element of the first plane
    SAME: tl.constexpr = min(WORD // SUB, PARTS)  # parts of a chunk that share a word
    dtype: tl.constexpr = rows.dtype.element_ty
    depth = tl.arange(0, SUB)
    length = chunks * (PARTS // PER_CODE)
    codes_at = codes + ((stored_row // 64).to(tl.int64) * length * 64 + stored_row % 64)[:, None] * SUB + depth[None, :]
    up_codes_at = codes_at + half.to(tl.int64) * length * SUB
    high_at = high + ((stored_row // 64).to(tl.int64) * chunks * 64 + stored_row % 64)[:, None] * SUB + depth[None, :]
    up_high_at = high_at + half.to(tl.int64) * chunks * SUB
    x = rows[None, :] + depth[:, None]
    total = tl.zeros((COLS, ROWS), tl.float32)
    up = tl.zeros((COLS, ROWS), tl.float32)
    await_previous(PDL)
    for chunk in range(first, last):
        for i in tl.static_range(PARTS):
            k = chunk * CHUNK + i * SUB
            if i % PER_CODE == 0:
                element = (chunk * (PARTS // PER_CODE) + i // PER_CODE) * 64 * SUB
                packed = tl.load(codes_at + element)
                if GATED:
                    up_packed = tl.load(up_codes_at + element)
            if i == 0:
                upper, scales = packed, packed  # not used without a second plane, and without superblocks
                if HIGH > 0:
                    upper = tl.load(high_at + chunk * 64 * SUB)
                if HAS_SUPERBLOCKS:
                    scales = tl.load(superblocks + k // 256 * words_stride + stored_row)
                if GATED:
                    up_upper, up_scales = up_packed, up_packed
                    if HIGH > 0:
                        up_upper = tl.load(up_high_at + chunk * 64 * SUB)
                    if HAS_SUPERBLOCKS:
                        up_scales = tl.load(superblocks + half + k // 256 * words_stride + stored_row)
            if i % SAME == 0:
                at = k // WORD * words_stride + stored_row
                word = tl.load(words + at)
                if GATED:
                    up_word = tl.load(words + half + at)
            mask = row_mask[None, :]
            if not EVEN:
                mask = mask & (k + depth < K)[:, None]
            inputs = tl.load(x + k, mask=mask, other=0.0)
            left = _dequantize_part(
                packed, upper, word, scales, i, KIND, LOW, HIGH, i * SUB % WORD // BLOCK, ZERO, dtype
            )
            total = add_dot(total, left, inputs, WIDEN)
            if GATED:
                left = _dequantize_part(
                    up_packed, up_upper, up_word, up_scales, i, KIND, LOW, HIGH, i * SUB % WORD // BLOCK, ZERO, dtype
                )
                up = add_dot(up, left, inputs, WIDEN)
    return total, up


@triton.jit(do_not_specialize=["M"])
def _packed_gemm(
    x, codes, high, words, superblocks, bias, out, partials, arrived, M, N, K, half, chunks, words_stride, x_stride, out_stride,
    COLS: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SUB: tl.constexpr,
    BLOCK: tl.constexpr, WORD: tl.constexpr, ZERO: tl.constexpr, PARTS: tl.constexpr, HAS_SUPERBLOCKS: tl.constexpr,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute a block of outputs; with GATED, rows `half` and on are the up rows, and the activation is fused."""
    dtype: tl.constexpr = out.dtype.element_ty
    block, split, row_block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, col = row_block * ROWS + tl.arange(0, ROWS), block * COLS + tl.arange(0, COLS)
    row_mask, col_mask = row < M, col < N
    chunks_per_split = tl.cdiv(chunks, SPLITS)
    total, up = packed_dot(
        x + row.to(tl.int64) * x_stride, row_mask, codes, high, words, superblocks, tl.minimum(col, half - 1), half, K,
        split * chunks_per_split, tl.minimum((split + 1) * chunks_per_split, chunks), chunks, words_stride, COLS, ROWS, KIND, LOW,
        HIGH, SUB, BLOCK, WORD, ZERO, PARTS, HAS_SUPERBLOCKS, GATED, EVEN, WIDEN, PDL,
    )  # fmt: skip
    to = row[None, :].to(tl.int64) * N + col[:, None]
    mask = row_mask[None, :] & col_mask[:, None]
    if SPLITS > 1:
        size = M.to(tl.int64) * N
        tl.store(partials + split * size + to, total, mask=mask)
        if GATED:
            tl.store(partials + (SPLITS + split) * size + to, up, mask=mask)
        tl.debug_barrier()  # all stores of the program precede its arrival
        arrival = arrived + row_block * tl.num_programs(0) + block
        if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") != SPLITS - 1:
            return
        tl.store(arrival, 0)  # for the next GEMM
        total = tl.zeros((COLS, ROWS), tl.float32)
        up = tl.zeros((COLS, ROWS), tl.float32)
        for source in tl.static_range(SPLITS):
            total += tl.load(partials + source * size + to, mask=mask, other=0.0, cache_modifier=".cg")
            if GATED:
                up += tl.load(partials + (SPLITS + source) * size + to, mask=mask, other=0.0, cache_modifier=".cg")
    if HAS_BIAS:
        total += tl.load(bias + col, mask=col_mask, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias + N + col, mask=col_mask, other=0.0).to(tl.float32)[:, None]
    if GATED:
        total = silu_and_mul_in(total, up, dtype)
    tl.store(out + row[None, :].to(tl.int64) * out_stride + col[:, None], total.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _dequantize_rows(
    ids, codes, high, words, superblocks, out, M, num_rows, K, chunks, words_stride,
    ROWS: tl.constexpr, KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SUB: tl.constexpr, BLOCK: tl.constexpr,
    WORD: tl.constexpr, ZERO: tl.constexpr, PARTS: tl.constexpr, HAS_SUPERBLOCKS: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """Dequantize a chunk of some rows to `out`, [M, K]: rows `ids` if GATHER, else the first M. Ids out of range give NaN."""
    PER_CODE: tl.constexpr = 16 // LOW
    dtype: tl.constexpr = out.dtype.element_ty
    line, depth, chunk = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SUB), tl.program_id(1)
    mask = line < M
    stored_row = line
    if GATHER:
        stored_row = tl.load(ids + line, mask=mask, other=0)
    known = (stored_row >= 0) & (stored_row < num_rows)
    stored_row = tl.where(known, stored_row, 0)
    tile, row = (stored_row // 64).to(tl.int64), stored_row % 64
    for i in tl.static_range(PARTS):
        k = chunk * PARTS * SUB + i * SUB
        if i % PER_CODE == 0:
            element = tile * chunks * (PARTS // PER_CODE) + chunk * (PARTS // PER_CODE) + i // PER_CODE
            packed = tl.load(codes + (element * 64 + row)[:, None] * SUB + depth[None, :])
        if i == 0:
            upper, scales = packed, packed
            if HIGH > 0:
                upper = tl.load(high + ((tile * chunks + chunk) * 64 + row)[:, None] * SUB + depth[None, :])
            if HAS_SUPERBLOCKS:
                scales = tl.load(superblocks + k // 256 * words_stride + stored_row)
        word = tl.load(words + k // WORD * words_stride + stored_row)
        left = _dequantize_part(packed, upper, word, scales, i, KIND, LOW, HIGH, i * SUB % WORD // BLOCK, ZERO, dtype)
        left = tl.where(known[:, None], left, float("nan"))
        to = line.to(tl.int64)[:, None] * K + k + depth[None, :]
        tl.store(out + to, left, mask=mask[:, None] & (k + depth < K)[None, :])


MAX_FUSED_ROWS = 64
"""Rows up to which the fused kernel is used. For more rows, cuBLAS on dequantized panels is faster: the GEMM is compute-bound."""


def constants(packing: Packing) -> dict[str, Any]:
    """Return the compile-time arguments that describe a format."""
    return {
        "KIND": packing.kind, "LOW": packing.low, "HIGH": packing.high, "SUB": packing.sub, "BLOCK": packing.block,
        "WORD": packing.word, "ZERO": packing.zero, "PARTS": packing.parts, "HAS_SUPERBLOCKS": packing.has_superblocks,
    }  # fmt: skip


class PackedGemm:
    """``x @ weight.T + bias``; for a gated MLP, ``silu(gate) * up`` of the result's halves."""

    def __init__(
        self,
        weight: PackedMatrix,
        bias: torch.Tensor | None,
        workspace: SplitKWorkspace,
        dtype: torch.dtype,
        *,
        tiling: PackedTiling | None = None,
    ) -> None:
        """Prepare a weight.

        Args:
            weight: packed weight, whose packing `is_aligned`.
            bias: one value per output, or None.
            workspace: shared by the GEMMs of a model.
            dtype: dtype of activations and outputs, bfloat16 or float16.
            tiling: tiling for any number of rows; None to choose one.
        """
        assert weight.packing.is_aligned, weight.packing
        self._weight, self._bias, self._workspace = weight, bias, workspace
        self._dtype, self._halves = dtype, 1 + weight.gated
        self.num_outputs = weight.num_outputs // self._halves
        # The kernels get placeholders, which they do not read, for a missing plane, missing superblocks or a missing bias.
        self._high = weight.codes if weight.high is None else weight.high
        self._superblocks = weight.words if weight.superblocks is None else weight.superblocks
        self._constants = constants(weight.packing)
        self._launch_options = launch_options(has_dependent_launch(weight.codes.device))
        sizes = (16, 32, 64) if tiling is None else (MAX_FUSED_ROWS,)
        self._tilings = {rows: tiling or choose_tiling(rows, self.num_outputs, weight) for rows in sizes}
        for rows, each in self._tilings.items():
            if each.splits > 1:
                num_blocks = triton.cdiv(rows, each.rows) * triton.cdiv(self.num_outputs, each.cols)
                workspace.reserve(each.splits * self._halves * rows * self.num_outputs, num_blocks)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., N] from x [..., K]."""
        if x.dim() != 2 or x.stride(1) != 1:
            out = self(x.reshape(-1, x.shape[-1]).contiguous())
            return out.view(*x.shape[:-1], out.shape[-1])
        if self._weight.order is not None:
            x = x.index_select(1, self._weight.order)
        if len(x) > MAX_FUSED_ROWS:
            return matmul_by_panels(x, self._weight, len(self._weight.codes), self._bias, self._dequantize)
        out = torch.empty(len(x), self.num_outputs, dtype=x.dtype, device=x.device)
        self._fused(x, out)
        return out

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write the outputs for x, [M, K], to columns of a wider tensor: `out`, [M, N]."""
        if len(x) > MAX_FUSED_ROWS or self._weight.order is not None:
            out.copy_(self(x))
        else:
            self._fused(x, out)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight, [T, K], for ids, int32 or int64 [T]; NaN for ids out of range."""
        out = torch.empty(len(ids), self._weight.num_inputs, dtype=self._dtype, device=ids.device)
        self._dequantize(out, ids=ids.contiguous())
        return out

    def _fused(self, x: torch.Tensor, out: torch.Tensor) -> None:
        weight, size, workspace = self._weight, self.num_outputs, self._workspace
        tiling = self._tilings[next(rows for rows in self._tilings if len(x) <= rows)]
        grid = triton.cdiv(size, tiling.cols), tiling.splits, triton.cdiv(len(x), tiling.rows)
        if not len(x):
            return
        _packed_gemm[grid](
            x, weight.codes, self._high, weight.words, self._superblocks, out if self._bias is None else self._bias, out,
            workspace.partials, workspace.arrived, len(x), size, weight.num_inputs, len(weight.codes) // self._halves * TILE,
            weight.chunks, weight.words.stride(0), x.stride(0), out.stride(0), COLS=tiling.cols, ROWS=tiling.rows,
            SPLITS=tiling.splits, HAS_BIAS=self._bias is not None, GATED=weight.gated, WIDEN=not x.is_cuda,
            EVEN=weight.num_inputs == weight.chunks * weight.packing.chunk, num_warps=tiling.warps,
            num_stages=tiling.stages, **self._constants, **self._launch_options,
        )  # fmt: skip

    def _dequantize(self, out: torch.Tensor, first_tile: int = 0, ids: torch.Tensor | None = None) -> None:
        """Dequantize rows `ids` to `out`; if `ids` is None, the rows from tile `first_tile` on."""
        weight, rows = self._weight, slice(first_tile * TILE, None)
        superblocks = self._superblocks if weight.superblocks is None else self._superblocks[:, rows]
        block = TILE if ids is None else _GATHERED_ROWS
        if not len(out):
            return
        _dequantize_rows[triton.cdiv(len(out), block), weight.chunks](
            out if ids is None else ids, weight.codes[first_tile:], self._high[first_tile:], weight.words[:, rows], superblocks,
            out, len(out), len(out) if ids is None else weight.num_outputs, weight.num_inputs, weight.chunks,
            weight.words.stride(0), ROWS=block, GATHER=ids is not None, num_warps=4, **self._constants,
        )  # fmt: skip


def matmul_by_panels(
    x: torch.Tensor,
    weight: TiledWeight,
    num_tiles: int,
    bias: torch.Tensor | None,
    dequantize: Callable[[torch.Tensor, int], None],
) -> torch.Tensor:
    """Dequantize panels of the weight to the model's dtype, and multiply by them.

    Args:
        x: [M, K or more].
        weight: the weight, whose codes are not read.
        num_tiles: T.
        bias: one value per output, or None.
        dequantize: function of a panel, [tiles * 64, K], and a tile. It fills the panel with the rows from that tile on.

    Returns:
        [M, N], in x's dtype.
    """
    x = x[:, : weight.num_inputs]
    step = max(1, _WEIGHTS_PER_PANEL // (TILE * max(weight.num_inputs, 1)))
    panel = torch.empty(min(step, num_tiles) * TILE, weight.num_inputs, dtype=x.dtype, device=x.device)
    stored = torch.empty(len(x), num_tiles * TILE, dtype=x.dtype, device=x.device)
    for start in range(0, num_tiles, step):
        rows = panel[: min(step, num_tiles - start) * TILE]
        dequantize(rows, start)
        stored[:, start * TILE : start * TILE + len(rows)] = F.linear(x, rows)
    out = weight.outputs(stored)
    out = out if bias is None else out + bias
    return silu_and_mul(out) if weight.gated else out
