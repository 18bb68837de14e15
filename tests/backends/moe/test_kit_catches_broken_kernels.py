"""Each class makes one mistake, which the kit must notice."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kit_runner import failures, iter_failures

from minisgl_backends.moe.torch_kernel import TorchMoe
from minisgl_core.contracts.moe import ExpertWeights, MoeCapabilities, MoeKernel, MoeSpec, RoutingSpec
from minisgl_core.testing.moe_cases import expected_output, expected_routing, random_case
from minisgl_core.testing.moe_kit import MoeKernelTests
from minisgl_core.testing.references import NaiveMoe


class SwapsGateAndUp(TorchMoe):
    def forward(self, x, weights, topk_weights, topk_ids) -> torch.Tensor:
        gate, up = weights.gate_up.chunk(2, dim=1)
        swapped = replace(weights, gate_up=torch.cat((up, gate), dim=1))
        return super().forward(x, swapped, topk_weights, topk_ids)


class IgnoresWeights(TorchMoe):
    def forward(self, x, weights, topk_weights, topk_ids) -> torch.Tensor:
        return super().forward(x, weights, torch.ones_like(topk_weights), topk_ids)


class NormalisesWeights(TorchMoe):
    def forward(self, x, weights, topk_weights, topk_ids) -> torch.Tensor:
        return super().forward(x, weights, topk_weights / topk_weights.sum(1, keepdim=True), topk_ids)


class SortsWeightsAway(TorchMoe):
    def forward(self, x, weights, topk_weights, topk_ids) -> torch.Tensor:
        return super().forward(x, weights, topk_weights.sort(dim=1)[0], topk_ids)


class UsesGelu(TorchMoe):
    def forward(self, *inputs: Any) -> torch.Tensor:
        silu, F.silu = F.silu, F.gelu
        try:
            return super().forward(*inputs)
        finally:
            F.silu = silu


class ForgetsTheLastExpert(TorchMoe):
    def forward(self, x, weights, topk_weights, topk_ids) -> torch.Tensor:
        last = topk_ids == self.spec.num_experts - 1
        return super().forward(x, weights, topk_weights.masked_fill(last, 0), topk_ids)


class SkipsEmptyExperts(TorchMoe):
    """Renumbers the experts that have tokens, so that the ids of the others are skipped."""

    def forward(self, x, weights, topk_weights, topk_ids) -> torch.Tensor:
        dense = torch.unique(topk_ids, return_inverse=True)[1]
        return super().forward(x, weights, topk_weights, dense)


class CapsAnExpertsTokens(TorchMoe):
    def forward(self, x, weights, topk_weights, topk_ids) -> torch.Tensor:
        seen = F.one_hot(topk_ids, self.spec.num_experts).sum(1).cumsum(0).gather(1, topk_ids)
        return super().forward(x, weights, topk_weights.masked_fill(seen > 64, 0), topk_ids)


class NeedsFullTiles(TorchMoe):
    def forward(self, *inputs: Any) -> torch.Tensor:
        result = super().forward(*inputs)
        result[:, result.shape[1] // 16 * 16 :] = 0
        return result


class ComputesInPlace(TorchMoe):
    def forward(self, x, *others: Any) -> torch.Tensor:
        return x.copy_(super().forward(x, *others))


class AlwaysFloat32(TorchMoe):
    capabilities = MoeCapabilities()

    def forward(self, x, weights, topk_weights, topk_ids) -> torch.Tensor:
        return super().forward(x.float(), as_float32(weights), topk_weights, topk_ids)


class SumsInHalf(TorchMoe):
    capabilities = MoeCapabilities()

    def forward(self, x, weights, topk_weights, topk_ids) -> torch.Tensor:
        if x.dtype == torch.float32:
            return super().forward(x, weights, topk_weights, topk_ids)
        result = torch.zeros_like(x)
        for token, (factors, ids) in enumerate(zip(topk_weights, topk_ids, strict=True)):
            for factor, expert in zip(factors, ids, strict=True):
                total = torch.zeros_like(weights.gate_up[expert, :, 0])
                for term in (weights.gate_up[expert] * x[token]).unbind(1):
                    total += term
                gate, up = total.chunk(2)
                result[token] += (factor * (weights.down[expert] @ (F.silu(gate) * up))).to(x.dtype)
        return result


class KeepsItsFirstBuffer(TorchMoe):
    def forward(self, x, *others: Any) -> torch.Tensor:
        self.buffer = getattr(self, "buffer", torch.zeros_like(x))
        result = super().forward(x, *others)
        self.buffer[: len(result)] += result
        return self.buffer[: len(result)].clone()


class KeepsItsFirstWeights(TorchMoe):
    def forward(self, x, weights, topk_weights, topk_ids) -> torch.Tensor:
        self.weights = getattr(self, "weights", weights)
        return super().forward(x, self.weights, topk_weights, topk_ids)


class ReturnsItsBuffer(TorchMoe):
    def forward(self, x, *others: Any) -> torch.Tensor:
        self.buffer = getattr(self, "buffer", torch.zeros(256, x.shape[1], dtype=x.dtype))
        return self.buffer[: len(x)].copy_(super().forward(x, *others))


class SkipsStrides(TorchMoe):
    def forward(self, x, *others: Any) -> torch.Tensor:
        return super().forward(x.as_strided(x.shape, (x.shape[1], 1)), *others)


class AcceptsAllFeatures(TorchMoe):
    """Declares no capabilities, but refuses no spec."""

    capabilities = MoeCapabilities()

    @classmethod
    def unsupported(cls, spec: MoeSpec) -> list[str]:
        return []


class DeclaresFeaturesItRefuses(TorchMoe):
    @classmethod
    def unsupported(cls, spec: MoeSpec) -> list[str]:
        return ["no biases yet"] if spec.has_bias else super().unsupported(spec)


class RefusesWithoutAReason(TorchMoe):
    capabilities = MoeCapabilities()

    @classmethod
    def unsupported(cls, spec: MoeSpec) -> list[str]:
        return [""] if super().unsupported(spec) else []


class TakesAnySpec(TorchMoe):
    """Ignores the fields that a subclass of `MoeSpec` adds."""

    @classmethod
    def unsupported(cls, spec: MoeSpec) -> list[str]:
        names = [each.name for each in fields(MoeSpec)]
        return super().unsupported(MoeSpec(**{name: getattr(spec, name) for name in names}))


class TakesWeightsOfAnyDtype(TorchMoe):
    @classmethod
    def unsupported(cls, spec: MoeSpec) -> list[str]:
        return super().unsupported(replace(spec, weight_dtype=None))


class IgnoresTheActivation(TorchMoe):
    def __init__(self, spec: MoeSpec) -> None:
        super().__init__(replace(spec, activation="silu"))
        self.spec = spec


class UsesExactGelu(TorchMoe):
    def __init__(self, spec: MoeSpec) -> None:
        super().__init__(spec)
        if spec.activation == "gelu_tanh" and spec.swiglu_limit is None:
            self._activate = lambda gate, up: F.gelu(gate) * up


class ForgetsTheOneOfUp(TorchMoe):
    def __init__(self, spec: MoeSpec) -> None:
        super().__init__(spec)
        if spec.activation == "swigluoai":
            with_one = self._activate
            self._activate = lambda gate, up: with_one(gate, up - 1)


class IgnoresTheLimit(TorchMoe):
    def __init__(self, spec: MoeSpec) -> None:
        super().__init__(replace(spec, swiglu_limit=None))
        self.spec = spec


class ClampsTheGateFromBelow(TorchMoe):
    def __init__(self, spec: MoeSpec) -> None:
        super().__init__(spec)
        if limit := spec.swiglu_limit:
            clamped = self._activate
            self._activate = lambda gate, up: clamped(gate.clamp(min=-limit), up)


class ClampsUpFromAboveAlone(TorchMoe):
    def __init__(self, spec: MoeSpec) -> None:
        super().__init__(replace(spec, swiglu_limit=None))
        self.spec = spec
        if limit := spec.swiglu_limit:
            plain = self._activate
            self._activate = lambda gate, up: plain(gate.clamp(max=limit), up.clamp(max=limit))


class ClampsAfterTheActivation(TorchMoe):
    def __init__(self, spec: MoeSpec) -> None:
        super().__init__(replace(spec, swiglu_limit=None))
        self.spec = spec
        if limit := spec.swiglu_limit:
            plain = self._activate
            self._activate = lambda gate, up: (
                plain(gate, torch.ones_like(up)).clamp(max=limit) * up.clamp(-limit, limit)
            )


class IgnoresBiases(TorchMoe):
    def forward(self, x, weights, topk_weights, topk_ids) -> torch.Tensor:
        unbiased = replace(weights, gate_up_bias=None, down_bias=None)
        return super().forward(x, unbiased, topk_weights, topk_ids)


class IgnoresTheBiasOfDown(TorchMoe):
    def forward(self, x, weights, topk_weights, topk_ids) -> torch.Tensor:
        return super().forward(x, replace(weights, down_bias=None), topk_weights, topk_ids)


class AddsTheBiasUnweighted(TorchMoe):
    def forward(self, x, weights, topk_weights, topk_ids) -> torch.Tensor:
        out = super().forward(x, replace(weights, down_bias=None), topk_weights, topk_ids)
        return out if weights.down_bias is None else out + weights.down_bias[topk_ids].sum(1)


class BiasesWithTheFirstExperts(TorchMoe):
    def forward(self, x, weights, topk_weights, topk_ids) -> torch.Tensor:
        if weights.gate_up_bias is not None:
            weights = replace(weights, gate_up_bias=weights.gate_up_bias[:1].expand_as(weights.gate_up_bias))
        return super().forward(x, weights, topk_weights, topk_ids)


class IgnoresScales(TorchMoe):
    def forward(self, x, weights, topk_weights, topk_ids) -> torch.Tensor:
        if weights.down_scales is not None:
            weights = replace(weights, down_scales=torch.ones_like(weights.down_scales))
        return super().forward(x, weights, topk_weights, topk_ids)


class HasOneScalePerExpert(TorchMoe):
    def forward(self, x, weights, topk_weights, topk_ids) -> torch.Tensor:
        if weights.gate_up_scales is not None:
            mean = weights.gate_up_scales.mean(-1, keepdim=True)
            weights = replace(weights, gate_up_scales=mean.expand_as(weights.gate_up_scales))
        return super().forward(x, weights, topk_weights, topk_ids)


def as_float32(weights: ExpertWeights) -> ExpertWeights:
    held = {each.name: getattr(weights, each.name) for each in fields(weights)}
    return replace(weights, **{name: each.float() for name, each in held.items() if each is not None})


BROKEN = [
    kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, MoeKernel) and kind.__module__ == __name__
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_kernel_fails_the_kit(broken: type[MoeKernel]) -> None:
    class Kit(MoeKernelTests):
        provider = broken

    name, error = next(iter_failures(Kit()))
    assert isinstance(error, AssertionError), name


class PlainMoe(TorchMoe):
    """A correct kernel that refuses everything but plain experts."""

    capabilities = MoeCapabilities()


@pytest.mark.parametrize("right", [TorchMoe, NaiveMoe, PlainMoe], ids=lambda right: right.__name__)
def test_a_correct_kernel_passes(right: type[MoeKernel]) -> None:
    class Kit(MoeKernelTests):
        provider = right

    assert failures(Kit()) == {}


def test_references_refuse_unknown_fields() -> None:
    """A new field of a dataclass in the contract must not be ignored."""

    @dataclass(frozen=True)
    class PackedWeights(ExpertWeights):
        zero_points: torch.Tensor | None = None

    @dataclass(frozen=True)
    class NoisyRouting(RoutingSpec):
        noise: float = 0.1

    spec = MoeSpec(4, 2, 16, 8, torch.float32, torch.device("cpu"))
    case = random_case(spec, 3)
    packed = replace(case, weights=PackedWeights(case.weights.gate_up, case.weights.down))
    for check in (lambda: expected_output(packed, spec), lambda: NaiveMoe(spec).forward(*packed.inputs())):
        with pytest.raises(AssertionError, match="zero_points"):
            check()
    with pytest.raises(AssertionError, match="noise"):
        expected_routing(torch.zeros(1, 4), NoisyRouting(2, True))
