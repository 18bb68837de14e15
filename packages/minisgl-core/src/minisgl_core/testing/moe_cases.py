"""Inputs of MoE kernels and of MoE routing, and their expected outputs in float64."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F

from minisgl_core.contracts.moe import UINT4, ExpertWeights, MoeSpec, RoutingSpec
from minisgl_core.testing.known_fields import check_fields
from minisgl_core.utils.fp8 import FP8, FP8_MAX, LEAST_SCALE, to_fp8

StoredWeight = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Weight as it is stored, its scales and its zero points."""
Shape = tuple[int, int, int, int, int]
"""Tokens, experts, experts per token, hidden size, intermediate size."""


def _skewed(num_tokens: int, num_experts: int, top_k: int, random: torch.Generator) -> torch.Tensor:
    """Route most tokens to the experts in the middle; the first and the last experts get few or none."""
    nearness = -(torch.arange(num_experts) - num_experts // 2).abs() * 2.0
    noise = torch.rand(num_tokens, num_experts, generator=random).log().neg().log().neg()  # of the Gumbel distribution
    return (nearness + noise).argsort(dim=1, descending=True)[:, :top_k]


ROUTINGS: dict[str, Callable[[int, int, int, torch.Generator], torch.Tensor]] = {
    "uniform": lambda tokens, experts, top_k, random: torch.rand(tokens, experts, generator=random).argsort(1)[
        :, :top_k
    ],
    # Every token goes to the last experts; the others get no tokens.
    "all alike": lambda tokens, experts, top_k, _: torch.arange(experts - 1, experts - 1 - top_k, -1).repeat(tokens, 1),
    "skewed": _skewed,
}


@dataclass(frozen=True, slots=True)
class MoeCase:
    """Arguments of one call of `MoeKernel.forward`."""

    x: torch.Tensor
    weights: ExpertWeights
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor

    def inputs(self) -> tuple[torch.Tensor, ExpertWeights, torch.Tensor, torch.Tensor]:
        """Return the arguments in the order of `MoeKernel.forward`."""
        return self.x, self.weights, self.topk_weights, self.topk_ids

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by name."""
        named = {each.name: getattr(self.weights, each.name) for each in fields(self.weights)}
        named |= {"x": self.x, "topk_weights": self.topk_weights, "topk_ids": self.topk_ids}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def random_case(spec: MoeSpec, num_tokens: int, routing: str = "uniform", seed: int = 0) -> MoeCase:
    """Return random inputs of about unit size for the experts of `spec`."""
    random = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=random)

    def stored(weight: torch.Tensor) -> StoredWeight:
        plain = weight.to(spec.dtype)
        if spec.weight_dtype in (None, spec.dtype):
            return plain, None, None
        return _fp8_rows(plain, random) if spec.weight_dtype == FP8 else _packed_rows(weight, spec, random)

    experts, hidden, inner = spec.num_experts, spec.hidden_size, spec.intermediate_size
    x, tensors = normal(num_tokens, hidden).to(spec.device, spec.dtype), dict[str, torch.Tensor]()
    for name, rows, columns in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
        weight, scales, zeros = stored(normal(experts, rows, columns) / columns**0.5)
        bias = normal(experts, rows).to(spec.dtype) if spec.has_bias else None
        found = {name: weight, f"{name}_scales": scales, f"{name}_zeros": zeros, f"{name}_bias": bias}
        tensors |= {name: each.to(spec.device) for name, each in found.items() if each is not None}
    weights = ExpertWeights(**tensors)
    topk_weights = torch.rand(num_tokens, spec.top_k, generator=random).to(spec.device)
    topk_ids = ROUTINGS[routing](num_tokens, experts, spec.top_k, random).to(spec.device)
    return MoeCase(x, weights, topk_weights, topk_ids)


def _packed_rows(weight: torch.Tensor, spec: MoeSpec, random: torch.Generator) -> StoredWeight:
    """Return random 4-bit codes, scales of very different sizes, and zero points (`UINT4` only), for blocks of 32 or 64."""
    block = 64 if spec.weight_dtype == UINT4 and weight.shape[2] > 64 else 32
    shape = (*weight.shape[:2], -(-weight.shape[2] // block))
    codes = torch.randint(256, (*shape[:2], shape[2] * block // 2), generator=random, dtype=torch.uint8)
    exponents = torch.randint(-3, 1, shape, generator=random) - round(math.log2(weight.shape[2]) / 2)
    if spec.weight_dtype == UINT4:
        scales = (exponents - 2.0).exp2() * (1 + torch.randint(8, shape, generator=random) / 8)  # exact in all dtypes
        return codes, scales.to(spec.dtype), torch.randint(16, shape, generator=random, dtype=torch.uint8)
    return codes, (exponents + 127).to(torch.uint8), None


def _fp8_rows(weight: torch.Tensor, random: torch.Generator) -> StoredWeight:
    """Multiply each row by a random power of two, and return the FP8 weight and the scale per row."""
    factors = torch.randint(-3, 4, (*weight.shape[:2], 1), generator=random).exp2()
    scaled = weight.float() * factors
    scales = scaled.abs().amax(-1, keepdim=True).clamp(min=LEAST_SCALE) / FP8_MAX
    return to_fp8(scaled, scales), scales.squeeze(-1), None


def activated(gate: torch.Tensor, up: torch.Tensor, activation: str, limit: float | None = None) -> torch.Tensor:
    """Clamp gate and up, and apply the activation; see `MoeSpec` for both."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "silu":
        return F.silu(gate) * up
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    assert activation == "swigluoai", f"the kits' references do not know the activation {activation!r}"
    return gate * (1.702 * gate).sigmoid() * (up + 1)


def dequantized(
    weight: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype, zeros: torch.Tensor | None, columns: int
) -> torch.Tensor:
    """Return weights of `ExpertWeights`, dequantized to `dtype`. Packed ones may have padding after the first `columns`."""
    if weight.dtype == torch.uint8 and scales is not None:
        values = torch.stack((weight % 16, weight // 16), -1).flatten(-2).to(dtype)
        size = values.shape[-1] // scales.shape[-1]
        scale, zero_point = scales.to(dtype), 8 if zeros is None else zeros.to(dtype).repeat_interleave(size, -1)
        if scales.dtype == torch.uint8:  # MXFP4: e2m1 codes and e8m0 scales
            sign, exponent, mantissa = values // 8, values % 8 // 2, values % 2
            magnitude = torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * (exponent - 1).exp2())
            values, zero_point, scale = magnitude * (1 - 2 * sign), 0, (scale - 127).exp2()
        return ((values - zero_point) * scale.repeat_interleave(size, -1))[..., :columns]
    return weight.to(dtype) if scales is None else weight.to(dtype) * scales.to(dtype)[..., None]


def expected_output(case: MoeCase, spec: MoeSpec) -> torch.Tensor:
    """Return the expected output in float64, on the CPU.

    Each expert is computed for all tokens; those that are not selected for a token have weight 0.
    """
    check_fields(spec)
    check_fields(case.weights)
    given = {name: tensor.cpu() for name, tensor in case.tensors().items()}
    x, ids = given["x"].double(), given["topk_ids"]
    gate_up_weight, down_weight = (
        dequantized(given[name], given.get(f"{name}_scales"), torch.float64, given.get(f"{name}_zeros"), columns)
        for name, columns in (("gate_up", spec.hidden_size), ("down", spec.intermediate_size))
    )
    hidden = torch.einsum("th,enh->etn", x, gate_up_weight)
    if "gate_up_bias" in given:
        hidden += given["gate_up_bias"].double()[:, None]
    gate, up = hidden.chunk(2, dim=-1)
    hidden = activated(gate, up, spec.activation, spec.swiglu_limit)
    outputs = torch.einsum("etn,ehn->eth", hidden, down_weight)
    if "down_bias" in given:
        outputs += given["down_bias"].double()[:, None]
    weights = torch.zeros(len(x), len(gate_up_weight), dtype=torch.float64)
    return torch.einsum("te,eth->th", weights.scatter_(1, ids, given["topk_weights"].double()), outputs)


def expected_routing(
    logits: torch.Tensor, spec: RoutingSpec, correction_bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the routing weight of each expert for each token, float64 [T, E]; 0 for experts that are not selected."""
    check_fields(spec)
    size = logits.shape[1] // spec.num_groups
    weights = torch.zeros(logits.shape, dtype=torch.float64)
    for token, row in enumerate(logits.cpu().double()):
        scores = (row.softmax(0) if spec.scoring == "softmax" else 1 / (1 + (-row).exp())).tolist()
        bias = [0.0] * len(scores) if correction_bias is None else correction_bias.cpu().double().tolist()
        biased = [score + each for score, each in zip(scores, bias, strict=True)]
        groups = [range(start, start + size) for start in range(0, len(scores), size)]
        # As in DeepSeek-V3, a group's score is the sum of its two largest biased scores.
        groups.sort(key=lambda group: sum(sorted((biased[i] for i in group), reverse=True)[:2]), reverse=True)
        allowed = [i for group in groups[: spec.topk_groups] for i in group]
        chosen = sorted(allowed, key=biased.__getitem__, reverse=True)[: spec.top_k]
        total = sum(scores[i] for i in chosen) if spec.renormalize else 1.0
        for i in chosen:
            weights[token, i] = scores[i] / total * spec.scaling_factor
    return weights


ROUTING_SPECS: dict[str, tuple[int, RoutingSpec, bool]] = {
    "softmax": (128, RoutingSpec(8, False), False),
    "renormalized softmax": (128, RoutingSpec(8, True), False),
    "softmax over few": (6, RoutingSpec(3, False), False),
    "renormalized softmax over few": (60, RoutingSpec(4, True), False),
    "one expert": (1, RoutingSpec(1, True), False),
    "scaled softmax": (60, RoutingSpec(4, True, scaling_factor=2.5), False),
    "biased softmax": (60, RoutingSpec(4, False), True),
    "grouped softmax": (64, RoutingSpec(6, False, num_groups=8, topk_groups=3), False),
    "sigmoid": (60, RoutingSpec(4, False, "sigmoid"), False),
    "renormalized sigmoid": (60, RoutingSpec(4, True, "sigmoid"), False),
    "biased sigmoid": (60, RoutingSpec(4, True, "sigmoid"), True),
    "grouped sigmoid": (64, RoutingSpec(6, False, "sigmoid", 8, 3), False),
    "DeepSeek-V3": (256, RoutingSpec(8, True, "sigmoid", 8, 4, 2.5), True),
    "groups of one": (12, RoutingSpec(2, True, "sigmoid", 12, 5), True),
    "all of the best groups": (12, RoutingSpec(6, True, "sigmoid", 4, 2), True),
}
"""Number of experts, routing, and True if selection has a correction bias; by name."""


def routing_cases(
    num_experts: int, has_bias: bool, dtype: torch.dtype, device: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yield logits without ties, [T, E], and the correction bias, [E].

    The first bias has values of both signs. The second is so low that all biased scores are negative.
    """
    random = torch.Generator().manual_seed(num_experts)
    order = torch.stack([torch.randperm(num_experts, generator=random) for _ in range(9)])
    logits = (order / max(4, num_experts / 8) - 3).to(device, dtype)  # sigmoids near 1 would have ties in float32
    if not has_bias:
        yield logits, None
        return
    bias = torch.rand(num_experts, generator=random) - 0.5
    yield logits, bias.to(device)
    yield logits, (bias - 3).to(device)
