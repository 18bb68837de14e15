"""Small-M GEMM for decodes of small batches, limited by the bandwidth at which weights are read.

A program computes a block of output columns in a loop over K. If there are too few columns to fill the GPU, K is split
(split-K): the last program of a block to arrive reduces the partial sums. With FP8 activations and weights, each row and each
output has a scale.

Shape legend: M rows, N outputs, K inputs.
"""

import torch
import triton
import triton.language as tl

from minisgl_backends.kernels.activation import silu_and_mul_in
from minisgl_backends.kernels.device import has_large_shared_memory
from minisgl_backends.kernels.dot import add_dot
from minisgl_backends.kernels.split_k import SplitKWorkspace

MAX_ROWS = 16
_COLS = 64
"""Output columns per program."""
_DEPTH_BYTES = 512
"""Bytes of a weight row that an iteration over K loads; in a gated MLP, half as many of a gate row and of an up row."""
_SPLITS = 4
"""Programs per block of columns if K is split."""
_FEW_BLOCKS = 64
"""K is split if there are fewer blocks of columns than this, about half of a data-center GPU's SMs."""


@triton.jit(do_not_specialize=["M"])
def _small_m_gemm(
    x, weight, bias, row_scales, scales, out, partials, arrived, M, N, K, x_stride,
    COLS: tl.constexpr, DEPTH: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    SCALED: tl.constexpr, ROWS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute a block of columns; with GATED, weight is [2 * N, K], the activation is fused, and K is not split.

    `total` has the sums of the outputs, or of the gate if GATED; `up` those of up.
    """
    block, split = tl.program_id(0), tl.program_id(1)
    row, col, depth = tl.arange(0, ROWS), block * COLS + tl.arange(0, COLS), tl.arange(0, DEPTH)
    row_mask, col_mask = row < M, col < N
    weight_rows = weight + col.to(tl.int64)[:, None] * K
    up_rows = weight_rows + tl.cast(N, tl.int64) * K  # N is no tensor if it is 1, which Triton makes a constant
    total = tl.zeros((COLS, ROWS), tl.float32)
    up = tl.zeros((COLS, ROWS), tl.float32)
    length = tl.cdiv(K // DEPTH, SPLITS) * DEPTH
    for start in range(split * length, tl.minimum((split + 1) * length, K), DEPTH):
        k = start + depth
        inputs = tl.load(x + row[None, :] * x_stride + k[:, None], mask=row_mask[None, :], other=0.0)
        rows = tl.load(weight_rows + k[None, :], mask=col_mask[:, None], other=0.0)
        total = add_dot(total, rows, inputs, WIDEN)
        if GATED:
            rows = tl.load(up_rows + k[None, :], mask=col_mask[:, None], other=0.0)
            up = add_dot(up, rows, inputs, WIDEN)
    to = row[None, :] * N + col[:, None]
    mask = row_mask[None, :] & col_mask[:, None]
    if SPLITS > 1:
        tl.store(partials + split * ROWS * N + to, total, mask=mask)
        tl.debug_barrier()  # all stores of the program precede its arrival
        if tl.atomic_add(arrived + block, 1, sem="acq_rel", scope="gpu") != SPLITS - 1:
            return
        tl.store(arrived + block, 0)  # for the next GEMM
        total = tl.zeros((COLS, ROWS), tl.float32)
        for part in tl.static_range(SPLITS):
            total += tl.load(partials + part * ROWS * N + to, mask=mask, other=0.0, cache_modifier=".cg")
    dtype: tl.constexpr = out.dtype.element_ty
    if SCALED:
        row_scale = tl.load(row_scales + row, mask=row_mask, other=0.0)[None, :]
        total *= tl.load(scales + col, mask=col_mask, other=0.0)[:, None] * row_scale
        if GATED:
            up *= tl.load(scales + N + col, mask=col_mask, other=0.0)[:, None] * row_scale
    if HAS_BIAS:
        total += tl.load(bias + col, mask=col_mask, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias + N + col, mask=col_mask, other=0.0).to(tl.float32)[:, None]
    if GATED:
        total = silu_and_mul_in(total, up, dtype)
    tl.store(out + to, total.to(dtype), mask=mask)


def supports_weight(weight: torch.Tensor) -> bool:
    """Return True if `SmallMGemm` supports this weight matrix."""
    size = weight.element_size()
    is_supported = weight.is_contiguous() and size <= 2 and weight.shape[1] % (_DEPTH_BYTES // size) == 0
    return is_supported and (not weight.is_cuda or has_large_shared_memory(weight.device))


class SmallMGemm:
    """``x @ weight.T + bias`` of at most `MAX_ROWS` rows; for a gated MLP, ``silu(gate) * up`` of the result's halves.

    Results are rounded to x's dtype where torch would round them, and to bfloat16 if x is FP8.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        workspace: SplitKWorkspace,
        *,
        gated: bool = False,
        scales: torch.Tensor | None = None,
    ) -> None:
        """Prepare a weight matrix for which `supports_weight` is True.

        Args:
            weight: [N, K]; if `gated`, [2 * N, K] with the gate rows before the up rows.
            bias: one value per row of the weight, or None.
            workspace: shared by the GEMMs of a model.
            gated: fuse the gated MLP's activation.
            scales: scale of each row of the weight, float32, if `weight` is FP8.
        """
        self._weight, self._bias, self._gated, self._workspace = weight, bias, gated, workspace
        self._scales = scales
        self._num_outputs = len(weight) // 2 if gated else len(weight)
        self._num_blocks = triton.cdiv(self._num_outputs, _COLS)
        self._splits = _SPLITS if self._num_blocks < _FEW_BLOCKS and not gated else 1
        if self._splits > 1:
            workspace.reserve(self._splits * MAX_ROWS * self._num_outputs, _FEW_BLOCKS)

    def __call__(self, x: torch.Tensor, row_scales: torch.Tensor | None = None) -> torch.Tensor:
        """Return [M, N] from x [M, K], with rows of any stride; FP8 x comes with `row_scales`, float32 [M, 1]."""
        weight, size = self._weight, self._num_outputs
        out = torch.empty(len(x), size, dtype=x.dtype if row_scales is None else torch.bfloat16, device=x.device)
        # The weight is a placeholder, which the kernel does not read as a bias or as scales.
        bias = weight if self._bias is None else self._bias
        scales = (weight, weight) if row_scales is None else (row_scales, self._scales)
        _small_m_gemm[(self._num_blocks, self._splits)](
            x, weight, bias, *scales, out, self._workspace.partials, self._workspace.arrived, len(x), size, weight.shape[1],
            x.stride(0), COLS=_COLS, DEPTH=_DEPTH_BYTES // weight.element_size() // (1 + self._gated), SPLITS=self._splits,
            HAS_BIAS=self._bias is not None, GATED=self._gated, SCALED=row_scales is not None, ROWS=MAX_ROWS,
            WIDEN=not x.is_cuda, num_warps=4, num_stages=4,
        )  # fmt: skip
        return out
