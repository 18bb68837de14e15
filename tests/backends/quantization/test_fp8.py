from __future__ import annotations

import pytest
import torch

from minisgl_backends.ops.triton_ops import TritonOps
from minisgl_backends.quantization.fp8 import Fp8
from minisgl_core.contracts.ops import LinearOps, Ops
from minisgl_core.contracts.quantization import Quantization, QuantizationSpec
from minisgl_core.fp8 import FP8, FP8_MAX
from minisgl_core.testing.quantization_kit import QuantizationTests

ON_GPU = torch.cuda.is_available()
CPU = torch.device("cpu")


class TestNone(QuantizationTests):
    provider = Quantization
    test_the_matrix_is_given_away = None  # type: ignore[assignment]
    loss = 0.01


class TestFp8(QuantizationTests):
    provider = Fp8


def spec(dtype: torch.dtype = torch.bfloat16, device: str = "cuda", num_experts: int = 0) -> QuantizationSpec:
    return QuantizationSpec(dtype, torch.device(device), num_experts)


def test_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert Fp8.unsupported(spec()) == Fp8.unsupported(spec(torch.float32, "cpu")) == []
    assert "bfloat16, not float16" in Fp8.unsupported(spec(torch.float16))[0]
    assert Fp8.unsupported(spec(num_experts=8)) == Fp8.unsupported(spec())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert "8.9 or later, and this GPU has 8.0" in Fp8.unsupported(spec())[0]


def test_each_output_and_each_token_has_a_scale() -> None:
    """Against float64 on what the quantised numbers stand for; large ones harm no others."""
    ops = Ops.of(CPU, torch.float32)
    weight, x = torch.randn(5000, 64), torch.randn(7, 64)
    weight[3] *= 1e4
    x[2] *= 1e-6
    codes, scales = Fp8(spec(torch.float32, "cpu"), ops)._quantize(weight)
    assert codes.dtype == FP8
    torch.testing.assert_close(codes.float() * scales[:, None], weight, rtol=2**-4, atol=1e-5)
    assert (codes.float().abs().amax(1) == FP8_MAX).all()
    x_codes, x_scales = ops.linear.quantize_rows(x)
    expected = (x_codes.double() * x_scales) @ (codes.double() * scales[:, None].double()).T
    found = ops.linear.prepare_fp8_linear(codes, scales, None)(x)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


def test_matrices_of_odd_sizes_stay_as_they_are() -> None:
    provider = Fp8(spec(torch.float32, "cpu"), Ops.of(CPU, torch.float32))
    weight, x = torch.randn(24, 40), torch.randn(3, 40)
    torch.testing.assert_close(provider.prepare_linear(weight, None)(x), x @ weight.T)


@pytest.mark.parametrize(
    ("num_rows", "outputs", "inputs", "has_bias"),
    [(16, 96, 1024, False), (3, 4160, 512, True)],
)
def test_triton_multiplies_by_larger_matrices_as_torch_does(
    num_rows: int, outputs: int, inputs: int, has_bias: bool
) -> None:
    """Few rows, split and not; twice, because split products leave counters behind that must be zero again."""
    pytest.importorskip("triton")
    device = torch.device("cuda" if ON_GPU else "cpu")
    ours, reference = TritonOps(device, torch.bfloat16), LinearOps(device, torch.bfloat16)
    weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16) / inputs**0.5
    codes, scales = reference.quantize_rows(weight)
    bias = torch.randn(outputs, device=device, dtype=torch.bfloat16) if has_bias else None
    for prepare in ("prepare_fp8_linear", "prepare_fp8_gated"):
        op, expected = (getattr(each, prepare)(codes, scales.view(-1), bias) for each in (ours, reference))
        for _ in range(2):
            x = torch.randn(num_rows, inputs, device=device, dtype=torch.bfloat16)
            found = op(x)
            assert found.dtype == torch.bfloat16
            torch.testing.assert_close(found, expected(x), rtol=3e-2, atol=3e-2)
