"""RMSNorm, with and without residual add. A row is one vector of N elements that is normalized.

Two bfloat16 values are multiplied in float32 and rounded once, as in torch. Triton's interpreter needs explicit casts for it.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from minisgl_backends.kernels.dependent_launch import await_previous, launch_options


@triton.jit
def _rms_norm(
    x, out, weight, num_rows, heads, stride_t, stride_h, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < N)[None, :]
    w = tl.load(weight + columns, mask=columns < N, other=0.0)
    await_previous(PDL)
    start = (rows // heads).to(tl.int64) * stride_t + (rows % heads) * stride_h
    values = tl.load(x + start[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / N + eps)
    normed = (values * scale[:, None]).to(w.dtype).to(tl.float32) * w[None, :].to(tl.float32)
    tl.store(out + rows.to(tl.int64)[:, None] * N + columns[None, :], normed, mask=mask)


@triton.jit
def _add_rms_norm(x, residual, weight, eps, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < N
    w = tl.load(weight + columns, mask=mask, other=0.0)
    await_previous(PDL)
    a = tl.load(x + row * N + columns, mask=mask, other=0.0)
    b = tl.load(residual + row * N + columns, mask=mask, other=0.0)
    new_residual = (a.to(tl.float32) + b.to(tl.float32)).to(a.dtype)
    tl.store(residual + row * N + columns, new_residual, mask=mask)
    values = new_residual.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / N + eps)
    normed = (values * scale).to(w.dtype).to(tl.float32) * w.to(tl.float32)
    tl.store(x + row * N + columns, normed, mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, pdl: bool = False) -> torch.Tensor:
    """Compute RMSNorm over the last dimension.

    Args:
        x: [..., N]; [T, N] and [T, heads, N] are not copied if the last dimension is contiguous.
        weight: [N].
        eps: added to the mean square.
        pdl: launch with PDL; see `dependent_launch`.

    Returns:
        A new contiguous tensor of x's shape.
    """
    size = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.dim() not in (2, 3):
        x = x.reshape(-1, size)
    if x.stride(-1) != 1:
        x = x.contiguous()
    heads, stride_h = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    num_rows = x.shape[0] * heads
    if num_rows:
        block = triton.next_power_of_2(size)
        rows = max(1, 1024 // block)  # several short rows, such as heads, per program
        grid: Any = (triton.cdiv(num_rows, rows),)
        _rms_norm[grid](
            x,
            out,
            weight,
            num_rows,
            heads,
            x.stride(0),
            stride_h,
            eps,
            N=size,
            BLOCK=block,
            ROWS=rows,
            num_warps=_warps(block),
            **launch_options(pdl),
        )
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(norm(x + residual), x + residual)``, both [..., N], in place of `x` and `residual` if these are contiguous."""
    x, residual, size = x.contiguous(), residual.contiguous(), x.shape[-1]
    num_rows = x.numel() // size
    if num_rows:
        block = triton.next_power_of_2(size)
        options = launch_options(pdl)
        _add_rms_norm[(num_rows,)](x, residual, weight, eps, N=size, BLOCK=block, num_warps=_warps(block), **options)
    return x, residual


def _warps(block: int) -> int:
    """Return the warps per program: one per 512 elements of a row, 4 to 16."""
    return min(max(block // 512, 4), 16)
