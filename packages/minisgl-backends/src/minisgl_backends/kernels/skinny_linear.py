"""Matrix products of a few rows: what a decode of a small batch is made of. All that matters is how fast weights are read.

Shape legend: M rows, N outputs, K inputs. A program holds a block of output columns and walks along K; where there are too
few columns to fill the GPU, K is split and the last program of a block to arrive adds up the parts. Where rows and weights are
float8, each row and each output has a scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl_backends.kernels.device import has_large_shared_memory
from minisgl_backends.kernels.product import add_product

MAX_ROWS = 16
_COLS, _DEPTH_BYTES = 64, 512
_FEW_BLOCKS, _SPLITS = 64, 4


@triton.jit(do_not_specialize=["M"])
def _linear(
    x, weight, bias, row_scales, scales, out, parts, arrived, M, N, K, x_stride,
    COLS: tl.constexpr, DEPTH: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    SCALED: tl.constexpr, ROWS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """With GATED, weight is [2 * N, K] and the result silu(first half) * second half; K is not split then."""
    block, split = tl.program_id(0), tl.program_id(1)
    row, col, depth = tl.arange(0, ROWS), block * COLS + tl.arange(0, COLS), tl.arange(0, DEPTH)
    row_mask, col_mask = row < M, col < N
    first = weight + col.to(tl.int64)[:, None] * K
    second = first + N.to(tl.int64) * K
    total = tl.zeros((COLS, ROWS), tl.float32)
    gated = tl.zeros((COLS, ROWS), tl.float32)
    length = tl.cdiv(K // DEPTH, SPLITS) * DEPTH
    for start in range(split * length, tl.minimum((split + 1) * length, K), DEPTH):
        place = start + depth
        inputs = tl.load(x + row[None, :] * x_stride + place[:, None], mask=row_mask[None, :], other=0.0)
        rows = tl.load(first + place[None, :], mask=col_mask[:, None], other=0.0)
        total = add_product(total, rows, inputs, WIDEN)
        if GATED:
            rows = tl.load(second + place[None, :], mask=col_mask[:, None], other=0.0)
            gated = add_product(gated, rows, inputs, WIDEN)
    to = row[None, :] * N + col[:, None]
    mask = row_mask[None, :] & col_mask[:, None]
    if SPLITS > 1:
        tl.store(parts + split * ROWS * N + to, total, mask=mask)
        tl.debug_barrier()  # all of the program's stores come before its arrival
        if tl.atomic_add(arrived + block, 1, sem="acq_rel", scope="gpu") != SPLITS - 1:
            return
        tl.store(arrived + block, 0)  # for the next product
        total = tl.zeros((COLS, ROWS), tl.float32)
        for part in tl.static_range(SPLITS):
            total += tl.load(parts + part * ROWS * N + to, mask=mask, other=0.0, cache_modifier=".cg")
    kind = out.dtype.element_ty
    if SCALED:
        of_rows = tl.load(row_scales + row, mask=row_mask, other=0.0)[None, :]
        total *= tl.load(scales + col, mask=col_mask, other=0.0)[:, None] * of_rows
        if GATED:
            gated *= tl.load(scales + N + col, mask=col_mask, other=0.0)[:, None] * of_rows
    if HAS_BIAS:
        total += tl.load(bias + col, mask=col_mask, other=0.0).to(tl.float32)[:, None]
        if GATED:
            gated += tl.load(bias + N + col, mask=col_mask, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gate = total.to(kind).to(tl.float32)
        silu = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
        total = silu * gated.to(kind).to(tl.float32)
    tl.store(out + to, total.to(kind), mask=mask)


def fits(weight: torch.Tensor) -> bool:
    """Whether `SkinnyLinear` takes this matrix."""
    size = weight.element_size()
    is_easy = weight.is_contiguous() and size <= 2 and weight.shape[1] % (_DEPTH_BYTES // size) == 0
    return is_easy and (not weight.is_cuda or has_large_shared_memory(weight.device))


class SkinnyLinear:
    """``x @ weight.T + bias`` of at most `MAX_ROWS` rows; for a gated MLP, ``silu(gate) * up`` of its halves.

    Results are rounded to the rows' dtype where torch would round them; those of float8 to bfloat16.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        scratch: SplitScratch,
        *,
        gated: bool = False,
        scales: torch.Tensor | None = None,
    ) -> None:
        """Keep the matrix.

        Args:
            weight: [N, K], or [2 * N, K] where `gated`, gate above up.
            bias: of the outputs, or None.
            scratch: for split products.
            gated: whether it is a gated MLP's.
            scales: of the outputs, float32, where `weight` is float8.
        """
        self._weight, self._bias, self._gated, self._scratch = weight, bias, gated, scratch
        self._scales = scales
        self._num_outputs = len(weight) // 2 if gated else len(weight)
        self._num_blocks = triton.cdiv(self._num_outputs, _COLS)
        self._splits = _SPLITS if self._num_blocks < _FEW_BLOCKS and not gated else 1
        if self._splits > 1:
            scratch.reserve(self._splits * MAX_ROWS * self._num_outputs)

    def __call__(self, x: torch.Tensor, row_scales: torch.Tensor | None = None) -> torch.Tensor:
        """x [M, K], rows of any stride; with `row_scales`, float32 [M, 1], where it is float8."""
        weight, size = self._weight, self._num_outputs
        out = torch.empty(len(x), size, dtype=x.dtype if row_scales is None else torch.bfloat16, device=x.device)
        bias = weight if self._bias is None else self._bias
        scales = (weight, weight) if row_scales is None else (row_scales, self._scales)
        _linear[(self._num_blocks, self._splits)](
            x, weight, bias, *scales, out, self._scratch.parts, self._scratch.arrived, len(x), size, weight.shape[1],
            x.stride(0), COLS=_COLS, DEPTH=_DEPTH_BYTES // weight.element_size() // (1 + self._gated), SPLITS=self._splits,
            HAS_BIAS=self._bias is not None, GATED=self._gated, SCALED=row_scales is not None, ROWS=MAX_ROWS,
            WIDEN=not x.is_cuda, num_warps=4, num_stages=4,
        )  # fmt: skip
        return out


class SplitScratch:
    """Where split products leave their parts; all matrices of a model share one, as they run one after the other.

    Attributes:
        parts: float32.
        arrived: programs that are done with a block of columns, int32; 0 between launches.
    """

    def __init__(self, device: torch.device) -> None:
        self.parts = torch.empty(0, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(_FEW_BLOCKS, dtype=torch.int32, device=device)

    def reserve(self, size: int) -> None:
        """Make room for this many values; to be called before any product runs."""
        if len(self.parts) < size:
            self.parts = torch.empty(size, dtype=torch.float32, device=self.parts.device)
