"""Each class makes one mistake, which the kit must notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kit_runner import failures, iter_failures

from minisgl_core.contracts.ops import (
    ROLES,
    LinearOp,
    LinearOps,
    NormOps,
    OpsProvider,
    Rope,
    RotaryOps,
    RoutingOps,
    SamplingOps,
    StepOps,
    TorchOps,
)
from minisgl_core.contracts.ops.norm import rms_norm
from minisgl_core.testing.ops_kit import OpsTests
from minisgl_core.utils.fp8 import FP8


class ReturnsABool(NormOps):
    @classmethod
    def unsupported(cls, device: torch.device, dtype: torch.dtype) -> Any:
        return False


class HasNoRole(OpsProvider):
    """Has a kernel, but derives from no role, so that the kernel would never be called."""

    def rms_norm(self, x, weight, eps) -> torch.Tensor:
        return rms_norm(x, weight, eps)


class ForgetsTheBias(LinearOps):
    def prepare_linear(self, weight, bias) -> LinearOp:
        return super().prepare_linear(weight, None)


class SwapsGateAndUp(LinearOps):
    def prepare_gated(self, weight, bias) -> LinearOp:
        return super().prepare_gated(weight.roll(len(weight) // 2, 0), bias)


class CountsRowsByLength(LinearOps):
    """Takes the first dimension for the number of rows, and so computes two rows of [2, 3, in]."""

    def prepare_linear(self, weight, bias) -> LinearOp:
        op = super().prepare_linear(weight, bias)
        return lambda x: op(x.reshape(-1, x.shape[-1])[: len(x)]) if x.dim() > 1 and len(x) <= 16 else op(x)


class ForgetsTheLastRows(LinearOps):
    def prepare_linear(self, weight, bias) -> LinearOp:
        op = super().prepare_linear(weight, bias)
        return lambda x: op(x).masked_fill((torch.arange(len(x)) >= max(len(x) // 4 * 4, 1))[:, None], 0)


class ReadsRowsFlat(LinearOps):
    def prepare_linear(self, weight, bias) -> LinearOp:
        op = super().prepare_linear(weight, bias)
        return lambda x: op(flat(x))


class AddsToItsLastResult(LinearOps):
    def prepare_linear(self, weight, bias) -> LinearOp:
        op, last = super().prepare_linear(weight, bias), torch.zeros(0)

        def gemm(x: torch.Tensor) -> torch.Tensor:
            nonlocal last
            found = op(x)
            last = found + last if found.shape == last.shape else found
            return last

        return gemm


class ScalesInPlace(NormOps):
    def rms_norm(self, x, weight, eps) -> torch.Tensor:
        return x.copy_(super().rms_norm(x, weight, eps))


class ForgetsEps(NormOps):
    def rms_norm(self, x, weight, eps) -> torch.Tensor:
        return super().rms_norm(x, weight, 0.0)


class SumsInHalf(NormOps):
    def rms_norm(self, x, weight, eps) -> torch.Tensor:
        total = torch.zeros_like(x[..., 0])
        for column in x.square().unbind(-1):
            total += column
        mean = total.float()[..., None] / x.shape[-1]
        return (x.float() * torch.rsqrt(mean + eps)).to(x.dtype) * weight


class ReadsNormsFlat(NormOps):
    def add_rms_norm(self, x, residual, weight, eps) -> tuple[torch.Tensor, torch.Tensor]:
        return super().add_rms_norm(flat(x), flat(residual), weight, eps)


class ReturnsTheOldResidual(NormOps):
    def add_rms_norm(self, x, residual, weight, eps) -> tuple[torch.Tensor, torch.Tensor]:
        return super().add_rms_norm(x, residual, weight, eps)[0], residual


class ReadsActivationsFlat(NormOps):
    def silu_and_mul(self, gate_up) -> torch.Tensor:
        return super().silu_and_mul(flat(gate_up))


class ActivatesRowsOnly(NormOps):
    def silu_and_mul(self, gate_up) -> torch.Tensor:
        return super().silu_and_mul(gate_up.reshape(-1, gate_up.shape[-1]))


class Overflows(NormOps):
    def silu_and_mul(self, gate_up) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return gate * gate.exp() / (1 + gate.exp()) * up


class ComputesExactGelu(NormOps):
    def gelu_tanh_and_mul(self, gate_up) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate) * up


class OverflowsInGelu(NormOps):
    def gelu_tanh_and_mul(self, gate_up) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        power = (2 * (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)).exp()
        return gate * power / (1 + power) * up


class ReadsGeluFlat(NormOps):
    def gelu_tanh_and_mul(self, gate_up) -> torch.Tensor:
        return super().gelu_tanh_and_mul(flat(gate_up))


class HidesNansInGelu(NormOps):
    def gelu_tanh_and_mul(self, gate_up) -> torch.Tensor:
        return super().gelu_tanh_and_mul(gate_up).nan_to_num()


class HidesNans(NormOps):
    def silu_and_mul(self, gate_up) -> torch.Tensor:
        return super().silu_and_mul(gate_up).nan_to_num()


class IgnoresTheDtypeOfInputs(NormOps):
    def rms_norm(self, x, weight, eps) -> torch.Tensor:
        if x.dtype != self.dtype:
            x = x.view(self.dtype).repeat(*[1] * (x.dim() - 1), 2)[..., : x.shape[-1]].to(x.dtype)
        return super().rms_norm(x, weight, eps)


class WidensToTheTables(RotaryOps):
    def apply_rope(self, q, k, cos, sin) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = super().apply_rope(q, k, cos, sin)
        return q.to(cos.dtype), k.to(cos.dtype)


class KeepsTheFirstTables(RotaryOps):
    def apply_rope(self, q, k, cos, sin) -> tuple[torch.Tensor, torch.Tensor]:
        self.tables = getattr(self, "tables", (cos, sin))
        if self.tables[0].shape != cos.shape:
            self.tables = cos, sin
        return super().apply_rope(q, k, *self.tables)


class RotatesInterleavedPairs(RotaryOps):
    """RoPE of interleaved pairs, as in GPT-J."""

    def apply_rope(self, q, k, cos, sin) -> tuple[torch.Tensor, torch.Tensor]:
        half = cos.shape[-1]
        order = torch.cat(
            (torch.arange(0, 2 * half, 2), torch.arange(1, 2 * half, 2), torch.arange(2 * half, q.shape[-1]))
        )
        q, k = super().apply_rope(q[..., order], k[..., order], cos, sin)
        return q[..., order.argsort()], k[..., order.argsort()]


class RotatesTheWholeHead(RotaryOps):
    def apply_rope(self, q, k, cos, sin) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = (x.repeat(1, 2)[:, : q.shape[-1] // 2] for x in (cos, sin))
        return super().apply_rope(q, k, cos, sin)


class RotatesValuesToo(RotaryOps):
    """Rotates one head more than k has, if q and k are views of one tensor."""

    def apply_rope(self, q, k, cos, sin) -> tuple[torch.Tensor, torch.Tensor]:
        q, more = super().apply_rope(q, k, cos, sin)
        if k._base is not None:
            k.as_strided((len(k), k.shape[1] + 1, k.shape[2]), k.stride()).zero_()
        return q, more


class RotatesBeforeNorms(RotaryOps):
    def qk_norm_rope(self, q, k, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = self.apply_rope(q, k, rope.cos, rope.sin)
        of_q, of_k = rope.norms or (None, None)
        if of_q is None or of_k is None:
            return q, k
        return rms_norm(q, of_q, rope.eps), rms_norm(k, of_k, rope.eps)


class SwapsTheNorms(RotaryOps):
    def qk_norm_rope(self, q, k, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        norms = rope.norms and rope.norms[::-1]
        return super().qk_norm_rope(q, k, Rope(rope.cos, rope.sin, norms, rope.eps))


class StoresKeysWithoutRope(RotaryOps):
    def qk_norm_rope_kv_store(self, q, k, v, rope, k_pages, v_pages, slots, scales=(1.0, 1.0)) -> torch.Tensor:
        found = super().qk_norm_rope_kv_store(q, k, v, rope, k_pages, v_pages, slots, scales)
        if k_pages.dtype != FP8:
            k_pages.view(-1, *k.shape[1:])[slots] = k
        return found


class ForgetsScales(RotaryOps):
    def qk_norm_rope_kv_store(self, q, k, v, rope, k_pages, v_pages, slots, scales=(1.0, 1.0)) -> torch.Tensor:
        return super().qk_norm_rope_kv_store(q, k, v, rope, k_pages, v_pages, slots)


class SwapsScales(RotaryOps):
    def qk_norm_rope_kv_store(self, q, k, v, rope, k_pages, v_pages, slots, scales=(1.0, 1.0)) -> torch.Tensor:
        return super().qk_norm_rope_kv_store(q, k, v, rope, k_pages, v_pages, slots, scales[::-1])


class ClearsPages(RotaryOps):
    def qk_norm_rope_kv_store(self, q, k, v, rope, k_pages, v_pages, slots, scales=(1.0, 1.0)) -> torch.Tensor:
        v_pages[slots // v_pages.shape[1]] = torch.zeros_like(v_pages[slots // v_pages.shape[1]])
        return super().qk_norm_rope_kv_store(q, k, v, rope, k_pages, v_pages, slots, scales)


class TakesTheLastOfTies(SamplingOps):
    def argmax(self, logits) -> torch.Tensor:
        return logits.shape[1] - 1 - logits.flip(-1).argmax(-1)


class IgnoresTemperature(SamplingOps):
    def sample(self, logits, temperature, uniform) -> torch.Tensor:
        return super().sample(logits, temperature.clamp(max=1.0).ceil(), uniform)


class SamplesAtZero(SamplingOps):
    def sample(self, logits, temperature, uniform) -> torch.Tensor:
        return super().sample(logits, temperature.clamp_min(0.5), uniform)


class SamplesInDescendingOrder(SamplingOps):
    def sample(self, logits, temperature, uniform) -> torch.Tensor:
        logits, order = logits.sort(-1, descending=True)
        return order.gather(1, super().sample(logits, temperature, uniform)[:, None])[:, 0]


class SamplesMaskedTokens(SamplingOps):
    def sample(self, logits, temperature, uniform) -> torch.Tensor:
        probs = torch.softmax(logits.float() / temperature.clamp_min(1e-5)[:, None], -1)
        found = (probs.cumsum(-1) >= uniform[:, None]).to(torch.uint8).argmax(-1)
        return torch.where(temperature > 0, found, logits.argmax(-1))


class ForgetsNewPages(StepOps):
    def decode_inputs(self, mapped_inputs, buffer_index, inputs, last_tokens, page_table, page_size) -> Any:
        return super().decode_inputs(mapped_inputs, buffer_index, inputs, last_tokens, page_table.clone(), page_size)


class ReadsSlotsBeforePageTableWrites(StepOps):
    def decode_inputs(self, mapped_inputs, buffer_index, inputs, last_tokens, page_table, page_size) -> Any:
        rows, _, positions = mapped_inputs[int(buffer_index), :3]
        slots = page_table[rows, positions // page_size].long() * page_size + positions % page_size
        return super().decode_inputs(mapped_inputs, buffer_index, inputs, last_tokens, page_table, page_size)[0], slots


class IndexesLastTokensByPosition(StepOps):
    def decode_inputs(self, mapped_inputs, buffer_index, inputs, last_tokens, page_table, page_size) -> Any:
        known, slots = super().decode_inputs(mapped_inputs, buffer_index, inputs, last_tokens, page_table, page_size)
        return torch.where(inputs[1] < 0, last_tokens.repeat(5)[: len(known)], known), slots


class ReadsPageTableFlat(StepOps):
    def decode_inputs(self, mapped_inputs, buffer_index, inputs, last_tokens, page_table, page_size) -> Any:
        return super().decode_inputs(mapped_inputs, buffer_index, inputs, last_tokens, flat(page_table), page_size)


class IgnoresBufferIndex(StepOps):
    def decode_inputs(self, mapped_inputs, buffer_index, inputs, last_tokens, page_table, page_size) -> Any:
        return super().decode_inputs(mapped_inputs, buffer_index * 0, inputs, last_tokens, page_table, page_size)


class CopiesOnlyUsedInputs(StepOps):
    def decode_inputs(self, mapped_inputs, buffer_index, inputs, last_tokens, page_table, page_size) -> Any:
        return super().decode_inputs(mapped_inputs[:, :4], buffer_index, inputs[:4], last_tokens, page_table, page_size)


class ForgetsHostTokens(StepOps):
    def decode_outputs(self, tokens, rows, last_tokens, mapped_tokens, buffer_index) -> None:
        super().decode_outputs(tokens, rows, last_tokens, mapped_tokens.clone(), buffer_index)


class ForgetsLastTokens(StepOps):
    def decode_outputs(self, tokens, rows, last_tokens, mapped_tokens, buffer_index) -> None:
        super().decode_outputs(tokens, rows, last_tokens.clone(), mapped_tokens, buffer_index)


class WritesTheOtherBuffer(StepOps):
    def decode_outputs(self, tokens, rows, last_tokens, mapped_tokens, buffer_index) -> None:
        super().decode_outputs(tokens, rows, last_tokens, mapped_tokens, 1 - buffer_index)
        buffer_index.neg_().add_(1)


class KeepsBufferIndex(StepOps):
    def decode_outputs(self, tokens, rows, last_tokens, mapped_tokens, buffer_index) -> None:
        super().decode_outputs(tokens, rows, last_tokens, mapped_tokens, buffer_index.clone())


class SortsTokensByRow(StepOps):
    def decode_outputs(self, tokens, rows, last_tokens, mapped_tokens, buffer_index) -> None:
        super().decode_outputs(tokens[rows.argsort()], rows.sort().values, last_tokens, mapped_tokens, buffer_index)


class IgnoresGatherIndex(StepOps):
    def gather_rows(self, table, index) -> torch.Tensor:
        return table[: len(index)].clone()


class IgnoresScatterIndex(StepOps):
    def scatter(self, table, index, values) -> None:
        table[: len(index)] = values


class ScattersAtMost128Rows(StepOps):
    def scatter(self, table, index, values) -> None:
        super().scatter(table, index[:128], values[:128])


class SamplesOnlyItsOwnShard(SamplingOps):
    def sample_shard(self, logits, temperature, uniform, shard) -> torch.Tensor:
        return self.sample(logits, temperature, uniform)


class SamplesPadding(SamplingOps):
    def sample_shard(self, logits, temperature, uniform, shard) -> torch.Tensor:
        return self.sample(shard.communicator.all_gather(logits), temperature, uniform)


class MasksTheFirstRows(SamplingOps):
    def mask_logits(self, logits, index, words) -> torch.Tensor:
        return super().mask_logits(logits, torch.arange(len(index)), words)


class MasksFromTheHighestBit(SamplingOps):
    def mask_logits(self, logits, index, words) -> torch.Tensor:
        bits = (words[:, :, None] >> torch.arange(31, -1, -1)) & 1
        ruled_out = bits.flatten(1)[:, : logits.shape[1]] == 0
        return logits.index_copy_(0, index, logits[index].masked_fill(ruled_out, -torch.inf))


class AlwaysNormalises(RoutingOps):
    def route(self, logits, spec, correction_bias=None) -> tuple[torch.Tensor, torch.Tensor]:
        return super().route(logits, replace(spec, renormalize=True), correction_bias)


class RoutesOverTheChosen(RoutingOps):
    def route(self, logits, spec, correction_bias=None) -> tuple[torch.Tensor, torch.Tensor]:
        if not spec.is_plain or correction_bias is not None:
            return super().route(logits, spec, correction_bias)
        values, experts = logits.topk(spec.top_k, -1)
        return values.softmax(-1, dtype=torch.float32), experts


class ScoresBySoftmaxAlone(RoutingOps):
    def route(self, logits, spec, correction_bias=None) -> tuple[torch.Tensor, torch.Tensor]:
        return super().route(logits, replace(spec, scoring="softmax"), correction_bias)


class IgnoresTheCorrectionBias(RoutingOps):
    def route(self, logits, spec, correction_bias=None) -> tuple[torch.Tensor, torch.Tensor]:
        return super().route(logits, spec)


class WeighsByCorrectedScores(RoutingOps):
    def route(self, logits, spec, correction_bias=None) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = super().route(logits, replace(spec, renormalize=False, scaling_factor=1.0), correction_bias)
        if correction_bias is not None:
            weights = weights + correction_bias[ids]
        if spec.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * spec.scaling_factor, ids


class CorrectsTheLogits(RoutingOps):
    def route(self, logits, spec, correction_bias=None) -> tuple[torch.Tensor, torch.Tensor]:
        return super().route(logits if correction_bias is None else logits + correction_bias, spec)


class IgnoresGroups(RoutingOps):
    def route(self, logits, spec, correction_bias=None) -> tuple[torch.Tensor, torch.Tensor]:
        return super().route(logits, replace(spec, num_groups=1, topk_groups=1), correction_bias)


class TakesOneGroupTooMany(RoutingOps):
    def route(self, logits, spec, correction_bias=None) -> tuple[torch.Tensor, torch.Tensor]:
        more = min(spec.topk_groups + 1, spec.num_groups)
        return super().route(logits, replace(spec, topk_groups=more), correction_bias)


class Grouped(RoutingOps):
    """Correct grouped routing, whose parts can be overridden by a mistake."""

    hidden = -torch.inf

    def route(self, logits, spec, correction_bias=None) -> tuple[torch.Tensor, torch.Tensor]:
        if spec.topk_groups == spec.num_groups:
            return super().route(logits, spec, correction_bias)
        scores = logits.float().sigmoid() if spec.scoring == "sigmoid" else logits.float().softmax(-1)
        groups = (scores if correction_bias is None else scores + correction_bias).unflatten(-1, (spec.num_groups, -1))
        best = self.score(groups).topk(spec.topk_groups, -1)[1]
        out = torch.ones(groups.shape[:2], dtype=torch.bool).scatter_(1, best, False)
        ids = groups.masked_fill(out[..., None], self.hidden).flatten(1).topk(spec.top_k, -1)[1]
        weights = scores.gather(1, ids)
        weights = weights / weights.sum(-1, keepdim=True) if spec.renormalize else weights
        return weights * spec.scaling_factor, ids

    def score(self, groups: torch.Tensor) -> torch.Tensor:
        return groups.topk(min(2, groups.shape[-1]), -1)[0].sum(-1)


class ScoresGroupsByTheirBest(Grouped):
    def score(self, groups: torch.Tensor) -> torch.Tensor:
        return groups.amax(-1)


class ScoresGroupsByTheirSum(Grouped):
    def score(self, groups: torch.Tensor) -> torch.Tensor:
        return groups.sum(-1)


class HidesGroupsByZero(Grouped):
    hidden = 0.0


class InterleavesGroups(Grouped):
    def route(self, logits, spec, correction_bias=None) -> tuple[torch.Tensor, torch.Tensor]:
        order = torch.arange(logits.shape[1]).view(-1, spec.num_groups).T.flatten()
        bias = None if correction_bias is None else correction_bias[order]
        weights, ids = super().route(logits[:, order], spec, bias)
        return weights, order[ids]


class IgnoresTheScalingFactor(RoutingOps):
    def route(self, logits, spec, correction_bias=None) -> tuple[torch.Tensor, torch.Tensor]:
        return super().route(logits, replace(spec, scaling_factor=1.0), correction_bias)


class ScalesBeforeNormalising(RoutingOps):
    def route(self, logits, spec, correction_bias=None) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = super().route(logits, spec, correction_bias)
        return (weights / weights.sum(-1, keepdim=True) if spec.renormalize else weights), ids


class OneScaleForAllRows(LinearOps):
    def quantize_rows(self, x) -> tuple[torch.Tensor, torch.Tensor]:
        scales = (x.abs().max().float() / 448).expand(len(x), 1)
        return (x / scales).to(FP8), scales


class DividesByZero(LinearOps):
    def quantize_rows(self, x) -> tuple[torch.Tensor, torch.Tensor]:
        scales = x.abs().amax(-1, keepdim=True).float() / 448
        return (x / scales).to(FP8), scales


class ForgetsOutputScales(LinearOps):
    def prepare_fp8_linear(self, weight, scales, bias) -> LinearOp:
        return super().prepare_fp8_linear(weight, torch.ones_like(scales), bias)


class RoundsSumsInFp8(LinearOps):
    def prepare_fp8_linear(self, weight, scales, bias) -> LinearOp:
        op = super().prepare_fp8_linear(weight, scales, bias)
        return lambda x: op(x).to(FP8).to(x.dtype)


class TakesRowsInFp8Only(LinearOps):
    def prepare_fp8_linear(self, weight, scales, bias) -> LinearOp:
        op = super().prepare_fp8_linear(weight, scales, bias)
        return lambda x: op(x.reshape(-1, x.shape[-1]))


BROKEN = [
    kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, OpsProvider) and kind.__module__ == __name__ and kind is not Grouped
]


def flat(x: torch.Tensor) -> torch.Tensor:
    """Return the values that a kernel reads if it takes every tensor for contiguous."""
    strides: list[int] = [1]
    for size in x.shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    return x.as_strided(x.shape, strides)


class Kit(OpsTests):
    shapes = ((70, 96), (64, 32))
    num_rows = (1, 2, 7, 17)
    sizes = (64,)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_provider_fails_the_kit(broken: type[OpsProvider]) -> None:
    class TestBroken(Kit):
        provider = broken

    name, error = next(iter_failures(TestBroken()))
    assert isinstance(error, AssertionError), name


@pytest.mark.parametrize("right", [TorchOps, *ROLES.values(), Grouped], ids=lambda right: right.__name__)
def test_a_correct_provider_passes(right: type[OpsProvider]) -> None:
    class TestRight(Kit):
        provider = right

    assert failures(TestRight()) == {}


def test_tests_of_missing_roles_are_skipped() -> None:
    class TestNorms(Kit):
        provider = NormOps

    TestNorms().test_rms_norm()
    for role, test in {
        "LinearOps": partial(TestNorms().test_gemms, False, False),
        "RotaryOps": partial(TestNorms().test_rotation, (3, 2, 80, 20), False),
        "SamplingOps": TestNorms().test_argmax,
        "StepOps": partial(TestNorms().test_scatter, 1),
        "RoutingOps": partial(TestNorms().test_routing, "softmax"),
    }.items():
        with pytest.raises(pytest.skip.Exception, match=f"NormOps does not subclass {role}"):
            test()


def test_an_unsupported_provider_is_skipped() -> None:
    class UnsupportedOps(TorchOps):
        @classmethod
        def unsupported(cls, device: torch.device, dtype: torch.dtype) -> list[str]:
            return ["there is no such device"]

    class TestUnsupported(Kit):
        provider = UnsupportedOps

    test: Callable[[], None] = TestUnsupported().test_rms_norm
    with pytest.raises(pytest.skip.Exception, match="no such device"):
        test()
    assert failures(TestUnsupported()) == {}
