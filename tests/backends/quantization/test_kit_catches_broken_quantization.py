"""Each class makes one mistake, which the kit must notice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fp8_checkpoints import BLOCKS, PER_CHANNEL, PER_TENSOR
from kit_runner import failures, iter_failures

from minisgl_backends.quantization.fp8 import Fp8, Fp8Experts, Fp8Linear
from minisgl_backends.quantization.fp8_checkpoint import CheckpointFp8Experts, CheckpointFp8Linear
from minisgl_core.contracts.layer_methods import (
    ExpertsMethod,
    ExpertsOp,
    ExpertsSpec,
    LinearMethod,
    LinearSpec,
    PlainExperts,
    PlainLinear,
)
from minisgl_core.contracts.moe import MoeKernel
from minisgl_core.contracts.ops import LinearOp
from minisgl_core.contracts.quantization import Quantization
from minisgl_core.contracts.shard import Shard
from minisgl_core.testing.quantization_kit import QuantizationTests


class OtherOp(Fp8):
    """Base class of mistakes: `loaded` changes a method's tensors after loading, and `changed` the operation."""

    def linear(self, spec: LinearSpec) -> LinearMethod:
        method: Any = super().linear(spec)
        prepare = method.prepare

        def changed() -> LinearOp:
            self.loaded(method)
            return self.changed(prepare(), method)

        method.prepare = changed
        return method

    def loaded(self, method: Any) -> None:
        """Do nothing."""

    def changed(self, op: LinearOp, method: Any) -> LinearOp:
        return op


class HasNoBias(Fp8):
    def linear(self, spec: LinearSpec) -> LinearMethod:
        return super().linear(replace(spec, bias=False))


class ForgetsTheBias(OtherOp):
    def loaded(self, method: Any) -> None:
        method.bias = method._bias = None


class IgnoresTheActivation(Fp8):
    def linear(self, spec: LinearSpec) -> LinearMethod:
        return super().linear(replace(spec, gated=False))


class SwapsGateAndUp(Fp8):
    def linear(self, spec: LinearSpec) -> LinearMethod:
        return super().linear(replace(spec, parts=spec.parts[::-1]) if spec.gated else spec)


class OneScaleForAllTokens(OtherOp):
    def changed(self, op: LinearOp, method: Any) -> LinearOp:
        def gemm(x: torch.Tensor) -> torch.Tensor:
            scale = x.abs().max() / 448
            return op((x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale)

        return gemm


class DividesByZero(OtherOp):
    def changed(self, op: LinearOp, method: Any) -> LinearOp:
        return lambda x: op(x) * (x.abs().amax(-1, keepdim=True) / x.abs().amax(-1, keepdim=True))


class ReadsFlat(OtherOp):
    def changed(self, op: LinearOp, method: Any) -> LinearOp:
        return lambda x: op(x.as_strided(x.shape, (x.shape[1], 1)))


class KeepsTheWeight(OtherOp):
    def changed(self, op: LinearOp, method: Any) -> LinearOp:
        weight = getattr(method, "weight", None)
        return lambda x: op(x) if weight is None or len(weight) else x


class KeepsAWideCopy(OtherOp):
    def changed(self, op: LinearOp, method: Any) -> LinearOp:
        if not isinstance(method, CheckpointFp8Linear) or method.spec.gated:
            return op
        wide, bias = (method._matrix.values.float() * method._matrix.scales[:, None]).to(self.spec.dtype), method._bias
        return lambda x: F.linear(x, wide, bias)


class WidensWhileLoading(Fp8):
    def linear(self, spec: LinearSpec) -> LinearMethod:
        method: Any = super().linear(spec)
        method.scratch = spec.empty(spec.out_features, spec.in_features)
        return method


class LoadsNothingPacked(Fp8):
    def linear(self, spec: LinearSpec) -> LinearMethod:
        return Fp8Linear(spec, self.ops)


class FourBits(OtherOp):
    def loaded(self, method: Any) -> None:
        if isinstance(method, PlainLinear):
            step = method.weight.abs().amax(1, keepdim=True) / 7
            method.weight.copy_((method.weight / step).round() * step)


class TakesTheFirstRows(Fp8):
    def linear(self, spec: LinearSpec) -> LinearMethod:
        parts = tuple(replace(part, rows=from_the_start(part.rows)) for part in spec.parts)
        return super().linear(replace(spec, parts=parts))


class TakesTheFirstColumns(Fp8):
    def linear(self, spec: LinearSpec) -> LinearMethod:
        return super().linear(replace(spec, columns=from_the_start(spec.columns)))


def from_the_start(shard: Shard) -> Shard:
    return Shard(0, shard.unpadded_size, shard.size, shard.total)


class OneScaleForFusedParts(OtherOp):
    def loaded(self, method: Any) -> None:
        if isinstance(method, CheckpointFp8Linear) and len(method.spec.parts) > 1:
            method._matrix.scales.fill_(method._matrix.scales.max())


class TakesTheFirstBlockOfColumns(OtherOp):
    def loaded(self, method: Any) -> None:
        if isinstance(method, CheckpointFp8Linear):
            for scales in method._matrix._block_scales:
                scales.copy_(scales[:, :1].expand_as(scales) * 1.3)


class QuantizesWhatTheCheckpointLeaves(Fp8):
    def linear(self, spec: LinearSpec) -> LinearMethod:
        method = super().linear(spec)
        return CheckpointFp8Linear(spec, self.ops, None) if type(method) is PlainLinear else method


class ForgetsTheScalesOfExperts(Fp8):
    def experts(self, spec: ExpertsSpec, kernel: type[MoeKernel]) -> ExpertsMethod:
        method: Any = super().experts(spec, kernel)
        if isinstance(method, Fp8Experts):
            quantize = method._quantize
            method._quantize = lambda weight: (quantize(weight)[0], torch.ones(weight.shape[:2]))
        return method


class OneScaleForAllExperts(Fp8):
    def experts(self, spec: ExpertsSpec, kernel: type[MoeKernel]) -> ExpertsMethod:
        method: Any = super().experts(spec, kernel)
        if isinstance(method, CheckpointFp8Experts):
            for matrix in method._matrices:
                matrix.scales = method._down_scales[0].new_empty(len(matrix.scales))
            method._down_scales.fill_(0.01)
            method._gate_up_scales.fill_(0.01)
        return method


class ForgetsTheBiasesOfExperts(Fp8):
    def experts(self, spec: ExpertsSpec, kernel: type[MoeKernel]) -> ExpertsMethod:
        method: Any = super().experts(spec, kernel)
        prepare = method.prepare

        def forgetful() -> ExpertsOp:
            method.gate_up_bias = method.down_bias = None
            return prepare()

        method.prepare = forgetful
        return method


class KeepsTheExperts(Fp8):
    def experts(self, spec: ExpertsSpec, kernel: type[MoeKernel]) -> ExpertsMethod:
        return PlainExperts(spec, kernel)


BROKEN: dict[type[Quantization], str] = {
    HasNoBias: "test_linear",
    ForgetsTheBias: "test_linear",
    IgnoresTheActivation: "test_gated",
    SwapsGateAndUp: "test_gated",
    OneScaleForAllTokens: "test_rows_are_independent",
    DividesByZero: "test_zeros",
    ReadsFlat: "test_strided_rows",
    KeepsTheWeight: "test_linear_weights_have_no_second_copy",
    KeepsAWideCopy: "test_linear_weights_have_no_second_copy",
    WidensWhileLoading: "test_linear_weights_have_no_second_copy",
    LoadsNothingPacked: "test_targets_are_the_checkpoints_tensors",
    FourBits: "test_linear",
    TakesTheFirstRows: "test_output_features_are_sharded",
    TakesTheFirstColumns: "test_input_features_are_sharded",
    OneScaleForFusedParts: "test_gated",
    TakesTheFirstBlockOfColumns: "test_linear",
    QuantizesWhatTheCheckpointLeaves: "test_unquantized_layers_of_quantized_checkpoints",
    ForgetsTheScalesOfExperts: "test_experts",
    OneScaleForAllExperts: "test_experts",
    ForgetsTheBiasesOfExperts: "test_experts",
    KeepsTheExperts: "test_expert_weights_have_no_second_copy",
}


class Kit(QuantizationTests):
    shapes = ((64, 128),)
    dtypes = (torch.float32,)
    checkpoints = (PER_TENSOR, PER_CHANNEL, BLOCKS)


def test_a_correct_provider_passes() -> None:
    class TestRight(Kit):
        provider = OtherOp

    assert failures(TestRight()) == {}


@pytest.mark.parametrize(("broken", "test"), BROKEN.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_provider_fails_the_kit(broken: type[Quantization], test: str) -> None:
    class TestBroken(Kit):
        provider = broken

    assert any(name.startswith(f"{test}(") for name, _ in iter_failures(TestBroken(), test))
