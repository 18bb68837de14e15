"""GEMM of 16-bit activations and 4-bit weights, which are dequantized in registers (W4A16).

A program computes a block of outputs for a block of rows. The dequantized codes are the left operand of the tensor cores, which
is read from registers, and the rows of x are the right one. K may be split: the last program of a block to arrive reduces the
partial sums.

Shape legend: M rows, N outputs, K inputs; codes, scales and zeros as `minisgl_backends.kernels.int4_weight` describes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from minisgl_backends.cuda import int4_gemm as hopper_int4_gemm
from minisgl_backends.cuda.gemm_tiling import MAX_ROWS as HOPPER_MAX_ROWS
from minisgl_backends.cuda.small_m_gemm import StreamKWorkspace
from minisgl_backends.kernels.activation import silu_and_mul
from minisgl_backends.kernels.dependent_launch import await_previous, launch_options
from minisgl_backends.kernels.device import has_large_shared_memory
from minisgl_backends.kernels.dot import add_dot
from minisgl_backends.kernels.int4_dequantize import dequantize
from minisgl_backends.kernels.int4_stages import dequantize_stages, pack_stages
from minisgl_backends.kernels.int4_weight import SYMMETRIC_ZERO, TILE, Int4Weight

_PANEL = 1 << 25
"""Weights that are dequantized at once for many rows."""


@triton.jit(do_not_specialize=["M"])
def _int4_gemm(
    x, codes, words, bias, out, parts, arrived, M, N, K, half, chunks, words_stride, x_stride,
    COLS: tl.constexpr, ROWS: tl.constexpr, SUB: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute a block of outputs; with GATED, rows `half` and on are the up rows, and the activation is fused."""
    CHUNK: tl.constexpr = 4 * SUB
    SAME: tl.constexpr = min(BLOCK // SUB, 4)  # parts of a chunk that share a scale
    dtype: tl.constexpr = out.dtype.element_ty
    block, split, row_block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, col = row_block * ROWS + tl.arange(0, ROWS), block * COLS + tl.arange(0, COLS)
    row_mask, col_mask = row < M, col < N
    place, depth = tl.minimum(col, half - 1), tl.arange(0, SUB)
    first = codes + ((place // 64).to(tl.int64) * chunks * 64 + place % 64)[:, None] * SUB + depth[None, :]
    second = first + half.to(tl.int64) * chunks * SUB
    rows = x + row[None, :].to(tl.int64) * x_stride + depth[:, None]
    total = tl.zeros((COLS, ROWS), tl.float32)
    gated = tl.zeros((COLS, ROWS), tl.float32)
    await_previous(PDL)
    length = tl.cdiv(chunks, SPLITS)
    for chunk in range(split * length, tl.minimum((split + 1) * length, chunks)):
        packed = tl.load(first + chunk * 64 * SUB)
        if GATED:
            packed2 = tl.load(second + chunk * 64 * SUB)
        for i in tl.static_range(4):
            part = chunk * CHUNK + i * SUB
            if i % SAME == 0:
                at = part // BLOCK * words_stride + place
                word = tl.load(words + at)
                if GATED:
                    word2 = tl.load(words + half + at)
            mask = row_mask[None, :]
            if not EVEN:
                mask = mask & (part + depth < K)[:, None]
            inputs = tl.load(rows + part, mask=mask, other=0.0)
            total = add_dot(total, dequantize(packed, word, i, dtype), inputs, WIDEN)
            if GATED:
                gated = add_dot(gated, dequantize(packed2, word2, i, dtype), inputs, WIDEN)
    to = row[None, :].to(tl.int64) * N + col[:, None]
    mask = row_mask[None, :] & col_mask[:, None]
    if SPLITS > 1:
        size = M.to(tl.int64) * N
        tl.store(parts + split * size + to, total, mask=mask)
        if GATED:
            tl.store(parts + (SPLITS + split) * size + to, gated, mask=mask)
        tl.debug_barrier()  # all stores of the program precede its arrival
        arrival = arrived + row_block * tl.num_programs(0) + block
        if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") != SPLITS - 1:
            return
        tl.store(arrival, 0)  # for the next GEMM
        total = tl.zeros((COLS, ROWS), tl.float32)
        gated = tl.zeros((COLS, ROWS), tl.float32)
        for part in tl.static_range(SPLITS):
            total += tl.load(parts + part * size + to, mask=mask, other=0.0, cache_modifier=".cg")
            if GATED:
                gated += tl.load(parts + (SPLITS + part) * size + to, mask=mask, other=0.0, cache_modifier=".cg")
    if HAS_BIAS:
        total += tl.load(bias + col, mask=col_mask, other=0.0).to(tl.float32)[:, None]
        if GATED:
            gated += tl.load(bias + N + col, mask=col_mask, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gate = total.to(dtype).to(tl.float32)
        silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        total = silu * gated.to(dtype).to(tl.float32)
    tl.store(out + to, total.to(dtype), mask=mask)


@triton.jit
def _dequantize_tile(codes, words, out, K, chunks, words_stride, SUB: tl.constexpr, BLOCK: tl.constexpr):
    """Dequantize a chunk of a tile to `out`, [T * 64, K]."""
    tile, chunk = tl.program_id(0), tl.program_id(1)
    line, depth = tl.arange(0, 64), tl.arange(0, SUB)
    packed = tl.load(codes + ((tile.to(tl.int64) * chunks + chunk) * 64 + line)[:, None] * SUB + depth[None, :])
    for i in tl.static_range(4):
        part = chunk * 4 * SUB + i * SUB
        word = tl.load(words + part // BLOCK * words_stride + tile * 64 + line)
        to = (tile.to(tl.int64) * 64 + line)[:, None] * K + part + depth[None, :]
        tl.store(out + to, dequantize(packed, word, i, out.dtype.element_ty), mask=(part + depth < K)[None, :])


def scale_words(weight: Int4Weight) -> torch.Tensor:
    """Return a scale and, above it, ``-(M + zero)`` in the 16 bits of the model's dtype, int32 [B, T * 64].

    M is the float whose last mantissa bit is worth 1: 128 in bfloat16, 1024 in float16. A word of 4 bytes is the least that
    asynchronous copies to shared memory take.
    """
    dtype = weight.scales.dtype
    base = 128 if dtype == torch.bfloat16 else 1024
    zeros = torch.full_like(weight.scales, SYMMETRIC_ZERO) if weight.zeros is None else weight.zeros
    return torch.stack((weight.scales, -(zeros.to(dtype) + base)), -1).view(torch.int32).squeeze(-1)


@dataclass(frozen=True, slots=True)
class Int4Tiling:
    """Distribution of a GEMM over programs.

    Attributes:
        cols: outputs per program; gate and up outputs count once.
        rows: rows per program.
        splits: programs per block, each with a part of K.
        warps: warps per program.
        stages: loads in flight.
    """

    cols: int
    rows: int
    splits: int = 1
    warps: int = 4
    stages: int = 4


MAX_ROWS = 64
"""Rows up to which the Triton kernel is used.

For 256 rows and the weights of Qwen3-14B on an H200, the fused kernel's first tiling took 31 ms. cuBLAS took 10 ms in bfloat16.
Dequantizing panels adds the time to write the weights.
"""


def choose_tiling(num_rows: int, num_outputs: int, weight: Int4Weight) -> Int4Tiling:
    """Return a tiling whose loads in flight fit into shared memory; `num_outputs` counts gate and up outputs once."""
    sub, gated = weight.codes.shape[3], weight.gated
    if num_rows <= 64:
        blocks = triton.cdiv(num_outputs, 64)
        splits = 1 if blocks >= 256 else min(4, max(1, 512 // blocks), max(1, weight.num_inputs // 1024))
        cols, rows, warps = 64, max(16, triton.next_power_of_2(num_rows)), 4
    else:
        cols, rows, splits, warps = (64, 128, 1, 4) if gated else (128, 128, 1, 8)
    shared = 220_000 if has_large_shared_memory(weight.codes.device) else 98_000
    stage = 8 * sub * rows + 2 * cols * (1 + gated) * (sub + 2 * max(1, 4 * sub // weight.block))
    return Int4Tiling(cols, rows, splits, warps, max(2, min(4, shared // stage)))


class Int4Workspace:
    """Partial sums of split-K GEMMs. All GEMMs of a model share one workspace, since they run one after the other.

    Attributes:
        parts: partial sums, float32.
        arrived: programs that have stored their partial sums, per block, int32; 0 between launches.
    """

    def __init__(self, device: torch.device) -> None:
        self.parts = torch.empty(0, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(0, dtype=torch.int32, device=device)

    def reserve(self, size: int, num_blocks: int) -> None:
        """Make room for `size` values and `num_blocks` counters. Must be called before any GEMM runs."""
        if len(self.parts) < size:
            self.parts = torch.empty(size, dtype=torch.float32, device=self.parts.device)
        if len(self.arrived) < num_blocks:
            self.arrived = torch.zeros(num_blocks, dtype=torch.int32, device=self.parts.device)


class Int4Gemm:
    """``x @ weight.T + bias``; for a gated MLP, ``silu(gate) * up`` of the result's halves."""

    def __init__(
        self,
        weight: Int4Weight,
        bias: torch.Tensor | None,
        workspace: Int4Workspace,
        *,
        overlap: bool = False,
        tiling: Int4Tiling | None = None,
        hopper: StreamKWorkspace | None = None,
    ) -> None:
        """Prepare a weight.

        Args:
            weight: packed weight in bfloat16 or float16; its scales are released.
            bias: one value per output, or None.
            workspace: shared by the GEMMs of a model.
            overlap: launch with PDL, see `dependent_launch`.
            tiling: tiling for any number of rows; None to choose one.
            hopper: workspace of the kernel in CUDA C++, which replaces the Triton kernel for weights that it supports.
        """
        self._weight, self._bias, self._workspace, self._overlap = weight, bias, workspace, overlap
        self._halves, self._words = 1 + weight.gated, scale_words(weight)
        self._num_outputs = weight.num_outputs // self._halves
        self._num_tiles, self._num_chunks, _, self._sub = weight.codes.shape
        self._small_m, self._max_rows = self._fused, MAX_ROWS
        self._stages: torch.Tensor | None = None
        if hopper is not None and hopper_int4_gemm.fits(weight):
            self._stages = pack_stages(weight, self._words)
            self._small_m = hopper_int4_gemm.HopperInt4Gemm(weight, self._stages, bias, hopper)
            self._max_rows = HOPPER_MAX_ROWS
            weight.codes, self._words = weight.codes.new_empty(0), self._words.new_empty(0)
        else:
            self._choose_tilings(tiling)
        weight.scales, weight.zeros = weight.scales.new_empty(0), None

    def _choose_tilings(self, tiling: Int4Tiling | None) -> None:
        self._tilings = {
            rows: tiling or choose_tiling(rows, self._num_outputs, self._weight)
            for rows in (16, 32, 64, 128, 256, 512, 1024)
        }
        for rows, each in self._tilings.items():
            if each.splits > 1:
                num_blocks = triton.cdiv(rows, each.rows) * triton.cdiv(self._num_outputs, each.cols)
                self._workspace.reserve(each.splits * self._halves * rows * self._num_outputs, num_blocks)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., N] from x [..., in]."""
        if x.dim() != 2 or x.stride(1) != 1:
            out = self(x.reshape(-1, x.shape[-1]).contiguous())
            return out.view(*x.shape[:-1], out.shape[-1])
        if self._weight.order is not None:
            x = x.index_select(1, self._weight.order)
        return self._small_m(x) if len(x) <= self._max_rows else self._dequantize_and_matmul(x)

    def _fused(self, x: torch.Tensor) -> torch.Tensor:
        weight, size, workspace = self._weight, self._num_outputs, self._workspace
        tiling = self._tilings[next(rows for rows in self._tilings if len(x) <= rows)]
        out = torch.empty(len(x), size, dtype=x.dtype, device=x.device)
        if not len(x):
            return out
        grid = triton.cdiv(size, tiling.cols), tiling.splits, triton.cdiv(len(x), tiling.rows)
        _int4_gemm[grid](
            x, weight.codes, self._words, out if self._bias is None else self._bias, out, workspace.parts,
            workspace.arrived, len(x), size, weight.num_inputs, self._num_tiles // self._halves * 64, self._num_chunks,
            self._words.stride(0), x.stride(0), COLS=tiling.cols, ROWS=tiling.rows, SUB=self._sub, BLOCK=weight.block,
            SPLITS=tiling.splits, HAS_BIAS=self._bias is not None, GATED=weight.gated,
            EVEN=weight.num_inputs == self._num_chunks * 4 * self._sub, WIDEN=not x.is_cuda, num_warps=tiling.warps,
            num_stages=tiling.stages, **launch_options(self._overlap),
        )  # fmt: skip
        return out

    def _dequantize_and_matmul(self, x: torch.Tensor) -> torch.Tensor:
        """Dequantize panels of the weight to the model's dtype, and multiply by them."""
        weight, tiles = self._weight, self._num_tiles
        x = x[:, : weight.num_inputs]
        step = max(1, _PANEL // (TILE * weight.num_inputs))
        panel = torch.empty(min(step, tiles) * TILE, weight.num_inputs, dtype=x.dtype, device=x.device)
        stored = torch.empty(len(x), tiles * TILE, dtype=x.dtype, device=x.device)
        for start in range(0, tiles, step):
            rows = panel[: min(step, tiles - start) * TILE]
            self._dequantize_tiles(start, rows)
            stored[:, start * TILE : start * TILE + len(rows)] = F.linear(x, rows)
        out = weight.outputs(stored)
        out = out if self._bias is None else out + self._bias
        return silu_and_mul(out) if weight.gated else out

    def _dequantize_tiles(self, start: int, out: torch.Tensor) -> None:
        """Dequantize the tiles from `start` on to `out`, [tiles * 64, K]."""
        weight = self._weight
        if self._stages is not None:
            dequantize_stages(self._stages, start, out, gated=weight.gated)
            return
        _dequantize_tile[(len(out) // TILE, self._num_chunks)](
            weight.codes[start:], self._words[:, start * TILE :], out, weight.num_inputs, self._num_chunks,
            self._words.stride(0), SUB=self._sub, BLOCK=weight.block, num_warps=4,
        )  # fmt: skip
