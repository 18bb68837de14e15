"""Dynamic quantization to FP8 or int8 with one scale per row, in one launch."""

import torch
import triton
import triton.language as tl

from minisgl_backends.kernels.dependent_launch import await_previous, launch_options
from minisgl_backends.kernels.fp8 import to_fp8
from minisgl_core.utils.fp8 import FP8, FP8_MAX, LEAST_SCALE


@triton.jit
def _quantize_rows(
    x, stride, quantized, scales, N, LARGEST: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < N
    values = tl.load(x + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 0) / LARGEST, LEAST)
    tl.store(scales + row, scale)
    if quantized.dtype.element_ty == tl.int8:
        tl.store(quantized + row * N + column, tl.floor(values / scale + 0.5).to(tl.int8), mask=mask)
    else:
        tl.store(quantized + row * N + column, to_fp8(values / scale), mask=mask)


def quantize_rows(x: torch.Tensor, dtype: torch.dtype = FP8, *, pdl: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """See `LinearOps.quantize_rows`; `dtype` is FP8 or int8. Codes in int8 are -127 to 127, with ties rounded up.

    With `pdl`, the launch uses PDL; see `dependent_launch`.
    """
    num_rows, size = x.shape
    quantized = torch.empty(num_rows, size, dtype=dtype, device=x.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    if num_rows:
        _quantize_rows[(num_rows,)](
            x, x.stride(0), quantized, scales, size, LARGEST=FP8_MAX if dtype == FP8 else 127.0, LEAST=LEAST_SCALE, BLOCK=block,
            num_warps=min(max(block // 1024, 1), 16), **launch_options(pdl),
        )  # fmt: skip
    return quantized, scales
