"""Each class makes one mistake; the kit must notice every one of them."""

from __future__ import annotations

import pytest
import torch

from minisgl_backends.quantization.fp8 import Fp8
from minisgl_core.contracts.moe import ExpertWeights, MoeKernel
from minisgl_core.contracts.ops import LinearOp
from minisgl_core.contracts.quantization import ExpertsOp, Quantization
from minisgl_core.testing.kit_runner import failures
from minisgl_core.testing.quantization_kit import QuantizationTests


class ForgetsTheBias(Fp8):
    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        return super().prepare_linear(weight, None)


class SwapsGateAndUp(Fp8):
    def prepare_gated(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        gate, up = weight.chunk(2)
        return super().prepare_gated(torch.cat((up, gate)), bias)


class OneScaleForAllTokens(Fp8):
    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        op = super().prepare_linear(weight, bias)

        def product(x: torch.Tensor) -> torch.Tensor:
            scale = x.abs().max() / 448
            return op((x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale)

        return product


class DividesByZero(Fp8):
    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        op = super().prepare_linear(weight, bias)
        return lambda x: op(x) * (x.abs().amax(-1, keepdim=True) / x.abs().amax(-1, keepdim=True))


class KeepsTheMatrix(Fp8):
    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        op = super().prepare_linear(weight, bias)
        return lambda x: op(x) if len(weight) else x


class ReadsFlat(Fp8):
    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        op = super().prepare_linear(weight, bias)
        return lambda x: op(x.as_strided(x.shape, (x.shape[1], 1)))


class FourBits(Fp8):
    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        step = weight.abs().amax(1, keepdim=True) / 7
        return super().prepare_linear((weight / step).round() * step, bias)


class ForgetsTheScalesOfExperts(Fp8):
    def _quantize_experts(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = super()._quantize_experts(weight)
        return codes, torch.ones_like(scales)


class KeepsTheExperts(Fp8):
    expert_dtype = None

    def prepare_experts(self, kernel: MoeKernel, weights: ExpertWeights) -> ExpertsOp:
        return Quantization.prepare_experts(self, kernel, weights)


BROKEN = [
    ForgetsTheBias, SwapsGateAndUp, OneScaleForAllTokens, DividesByZero, KeepsTheMatrix, ReadsFlat, FourBits,
    ForgetsTheScalesOfExperts, KeepsTheExperts,
]  # fmt: skip


class Kit(QuantizationTests):
    shapes = ((64, 128),)
    dtypes = (torch.float32,)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_provider_fails_the_kit(broken: type[Quantization]) -> None:
    class TestBroken(Kit):
        provider = broken

    assert failures(TestBroken)
