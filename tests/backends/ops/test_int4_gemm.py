"""The W4A16 kernel, in Triton's interpreter or on a GPU, against float64. float16, whose casts the interpreter rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from packed_reference import DTYPE, check, expected

pytest.importorskip("triton")
from minisgl_backends.kernels import packed_gemm
from minisgl_backends.kernels.int4_gemm import Int4Gemm
from minisgl_backends.kernels.int4_weight import Int4Weight
from minisgl_backends.kernels.packed_tiling import PackedTiling
from minisgl_backends.kernels.split_k import SplitKWorkspace

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def packed(
    rows: int, columns: int, block: int | None, *, has_zeros: bool, gated: bool
) -> tuple[Int4Weight, torch.Tensor]:
    """Return a random weight, and what it stands for in float64."""
    random = torch.Generator().manual_seed(rows + columns)
    count = 1 if block is None else -(-columns // block)
    codes = torch.randint(16, (rows, columns), generator=random, dtype=torch.uint8)
    zeros = torch.randint(16, (rows, count), generator=random) if has_zeros else torch.full((rows, count), 8)
    scales = (torch.rand(rows, count, generator=random) + 0.5).div(columns**0.5 * 4).to(DTYPE)
    weight = Int4Weight.empty(rows, columns, block, DTYPE, DEVICE, has_zeros=has_zeros, gated=gated)
    for start, size in ((0, rows // 2), (rows // 2, rows - rows // 2)):
        at, part = weight.rows_of(start, size), slice(start, start + size)
        weight.store(at, codes[part].to(DEVICE))
        weight.scales[:count, at] = scales[part].t().to(DEVICE)
        if weight.zeros is not None:
            weight.zeros[:count, at] = zeros[part].t().to(DEVICE, torch.uint8)
    group = torch.arange(columns) // (block or columns)
    return weight, ((codes.double() - zeros[:, group]) * scales.double()[:, group]).to(DEVICE)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "block", "has_zeros", "tiling"),
    [
        (72, 256, 128, False, None),
        (144, 160, 32, True, PackedTiling(64, 16)),
        (144, 320, 64, True, PackedTiling(128, 16, splits=3)),
        (80, 200, None, False, PackedTiling(64, 32, splits=2)),
        (64, 40, None, True, PackedTiling(64, 16, splits=4)),
        (72, 300, 96, True, None),  # groups and chunks of inputs overlap
    ],
)
def test_gemm(
    rows: int,
    columns: int,
    block: int | None,
    has_zeros: bool,
    tiling: PackedTiling | None,
    gated: bool,
    has_bias: bool,
) -> None:
    """Run each GEMM twice, because split-K must reset its counters to zero."""
    weight, known = packed(rows, columns, block, has_zeros=has_zeros, gated=gated)
    bias = torch.randn(rows, device=DEVICE, dtype=DTYPE) if has_bias else None
    gemm = Int4Gemm(weight, bias, SplitKWorkspace(DEVICE), tiling=tiling)
    assert weight.scales.untyped_storage().nbytes() == 0  # the kernel reads words of scale and zero point
    for num_rows in (19, 1):
        x = torch.randn(num_rows, columns + 8, device=DEVICE, dtype=DTYPE)[:, :columns]
        check(gemm(x), expected(x, known, bias, gated=gated))
    assert gemm(x[:0]).shape == (0, rows // (1 + gated))
    check(gemm(x[None]), expected(x, known, bias, gated=gated)[None])


@pytest.mark.parametrize("gated", [False, True])
def test_many_rows_are_multiplied_by_dequantized_panels(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_gemm, "MAX_FUSED_ROWS", 4)
    monkeypatch.setattr(packed_gemm, "_WEIGHTS_PER_PANEL", 1)  # one tile each
    weight, known = packed(176, 320, 32, has_zeros=True, gated=gated)
    bias = torch.randn(176, device=DEVICE, dtype=DTYPE)
    x = torch.randn(7, 320, device=DEVICE, dtype=DTYPE)
    check(Int4Gemm(weight, bias, SplitKWorkspace(DEVICE))(x), expected(x, known, bias, gated=gated))


@pytest.mark.parametrize("num_rows", [3, packed_gemm.MAX_FUSED_ROWS + 1])
def test_weight_without_inputs_gives_the_bias(num_rows: int) -> None:
    """All inputs of a layer may be on other ranks; x has padding."""
    weight = Int4Weight.empty(72, 0, 128, DTYPE, DEVICE)
    bias = torch.randn(72, device=DEVICE, dtype=DTYPE)
    out = Int4Gemm(weight, bias, SplitKWorkspace(DEVICE))(torch.randn(num_rows, 8, device=DEVICE, dtype=DTYPE))
    assert torch.equal(out, bias.expand(num_rows, -1))


def test_inputs_come_in_the_order_of_the_weight() -> None:
    weight, known = packed(64, 256, 128, has_zeros=False, gated=False)
    order = torch.randperm(256, device=DEVICE)
    x = torch.randn(3, 256, device=DEVICE, dtype=DTYPE)
    gemm = Int4Gemm(replace(weight, order=order), None, SplitKWorkspace(DEVICE))
    check(gemm(x), x[:, order].double() @ known.T)
