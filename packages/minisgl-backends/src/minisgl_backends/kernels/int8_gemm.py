"""GEMM of 8-bit integer weights, with a scale per output channel, and activations that are quantized per row (W8A8).

Dot products accumulate exactly in int32. The epilogue multiplies by both scales.

Shape legend: M rows, N outputs, K inputs.
"""

import torch
import triton
import triton.language as tl

from minisgl_backends.kernels.activation import silu_and_mul
from minisgl_backends.kernels.quantize import quantize_rows


@triton.jit(do_not_specialize=["M"])
def _int8_gemm(
    x, row_scales, weight, scales, bias, out, M, N, K,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    row, col = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(0) * COLS + tl.arange(0, COLS)
    row_mask, col_mask = row < M, col < N
    rows = x + row.to(tl.int64)[:, None] * K
    cols = weight + col.to(tl.int64)[None, :] * K
    total = tl.zeros((ROWS, COLS), tl.int32)
    for start in range(0, K, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        left = tl.load(rows + depth[None, :], mask=row_mask[:, None] & (depth < K)[None, :], other=0)
        right = tl.load(cols + depth[:, None], mask=col_mask[None, :] & (depth < K)[:, None], other=0)
        total = tl.dot(left, right, total, out_dtype=tl.int32)
    row_scale = tl.load(row_scales + row, mask=row_mask, other=0.0)[:, None]
    result = total.to(tl.float32) * row_scale * tl.load(scales + col, mask=col_mask, other=0.0)[None, :]
    if HAS_BIAS:
        result += tl.load(bias + col, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    to = out + row.to(tl.int64)[:, None] * N + col[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=row_mask[:, None] & col_mask[None, :])


class Int8Gemm:
    """``x @ weight.T + bias``, followed by ``silu_and_mul`` if the layer is gated."""

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, *, gated: bool) -> None:
        """Take the codes, int8 [N, K], and the scales, float32 [N]."""
        self._codes, self._scales, self._bias, self._gated = codes, scales, bias, gated

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., N] from x, [..., K], or [..., N / 2] if the layer is gated."""
        size, inputs = self._codes.shape
        flat = x.reshape(-1, inputs)
        flat = flat if flat.stride(1) == 1 else flat.contiguous()
        rows, row_scales = quantize_rows(flat, torch.int8)
        out = torch.empty(len(flat), size, dtype=x.dtype, device=x.device)
        block = min(128, max(16, triton.next_power_of_2(len(flat))))
        bias = out if self._bias is None else self._bias  # `out` is a placeholder, which is not read
        if len(flat):
            _int8_gemm[triton.cdiv(size, 64), triton.cdiv(len(flat), block)](
                rows, row_scales, self._codes, self._scales, bias, out, len(flat), size, inputs,
                ROWS=block, COLS=64, DEPTH=128, HAS_BIAS=self._bias is not None, num_warps=4, num_stages=3,
            )  # fmt: skip
        out = out.view(*x.shape[:-1], size)
        return silu_and_mul(out) if self._gated else out
