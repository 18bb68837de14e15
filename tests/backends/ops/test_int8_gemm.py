"""The W8A8 kernel, in Triton's interpreter or on a GPU, against exact sums in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
from minisgl_backends.kernels.int8_gemm import Int8Gemm
from minisgl_backends.kernels.quantize import quantize_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 128), (80, 200), (34, 40)])
def test_gemm(outputs: int, inputs: int, gated: bool, has_bias: bool) -> None:
    codes = torch.randint(-128, 128, (outputs, inputs), device=DEVICE).to(torch.int8)
    codes[:2] = -128  # the largest possible sums
    scales = torch.rand(outputs, device=DEVICE) / 1000
    bias = torch.randn(outputs, device=DEVICE) if has_bias else None
    gemm = Int8Gemm(codes, scales, bias, gated=gated)
    for num_rows in (19, 1, 130):
        x = torch.randn(num_rows, inputs + 8, device=DEVICE)[:, :inputs]
        x[0] = 1
        step = x.double().abs().amax(1, keepdim=True) / 127
        known = (x.double() / step).round() * step @ (codes.double() * scales.double()[:, None]).T
        known = known if bias is None else known + bias.double()
        if gated:
            gate, up = known.chunk(2, -1)
            known = F.silu(gate) * up
        found = gemm(x)
        # A quotient near a half may round to the other code.
        assert (found.double() - known).norm() < 1e-3 * known.norm()
    assert torch.equal(gemm(x[None]), found[None])
    assert gemm(x[:0]).shape == (0, outputs // (1 + gated))


def test_rows_of_zeros_and_of_any_size() -> None:
    x = torch.tensor([[0.0, 0.0, 0.0], [127.0, -127.0, 0.4], [1e20, -1e20, 5e19]], device=DEVICE)
    codes, scales = quantize_rows(x, torch.int8)
    assert codes.tolist() == [[0, 0, 0], [127, -127, 0], [127, -127, 64]]
    torch.testing.assert_close(scales[1:, 0], torch.tensor([1.0, 1e20 / 127], device=DEVICE))
