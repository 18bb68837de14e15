"""Routed and shared experts over ranks, compared with transformers' modules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from minisgl_backends.moe.torch_kernel import TorchMoe
from minisgl_backends.quantization.fp8 import Fp8
from minisgl_core.contracts.communicator import Communicator, SingleRank
from minisgl_core.contracts.layer import Layer, prepare_all
from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.moe import MoeCapabilities, MoeKernel, RoutingSpec
from minisgl_core.contracts.ops import Ops, RoutingOps
from minisgl_core.contracts.quantization import QuantizationSpec
from minisgl_core.errors import ModelFormatError, ProviderUnsupportedError
from minisgl_core.layers import (
    FusedMoE,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from minisgl_core.layers.moe import check_routing
from minisgl_core.testing.rank_threads import run_ranks
from minisgl_core.testing.references import NaiveMoe

HIDDEN, INNER, EXPERTS, TOP_K = 32, 21, 12, 4
DEEPSEEK = RoutingSpec(TOP_K, True, "sigmoid", num_groups=4, topk_groups=2, scaling_factor=2.5)


def build_for(communicator: Communicator, kernel: type[MoeKernel] = TorchMoe) -> BuildContext:
    device = torch.device("cpu")
    return BuildContext(communicator, Ops.of(device, torch.float32), device, torch.float32, kernel)


def randomised(module: nn.Module) -> Any:
    """Fill parameters and buffers with random values, so that mistakes are visible."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            size = tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 0.5
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 1.5 * size)
    return module.float().eval().requires_grad_(False)


def load(layer: Layer, tensors: dict[str, torch.Tensor], fused_projections: Any) -> None:
    """Load a layer from a checkpoint's tensors, and check that all are used."""
    used = set()
    for name, target in layer.weight_targets("", fused_projections):
        name = name.removeprefix(".")
        assert target.shape in (None, tensors[name].shape), name
        target.destination.copy_(tensors[name][target.index])
        used.add(name)
    assert used == set(tensors)
    prepare_all(layer)


class Router(ReplicatedLinear):
    """A linear layer and the correction bias of the selection."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__(HIDDEN, EXPERTS, build)
        self.e_score_correction_bias = nn.Parameter(torch.empty(EXPERTS), requires_grad=False)


class SharedExperts(Layer):
    def __init__(self, build: BuildContext) -> None:
        self.gate_up_proj = MergedColumnParallelLinear(HIDDEN, [INNER, INNER], build, silu_and_mul=True)
        self.down_proj = RowParallelLinear(INNER, HIDDEN, build, reduce=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj.forward(self.gate_up_proj.forward(x))


class DeepseekMoE(Layer):
    """MoE block as a plugin would write it."""

    def __init__(self, build: BuildContext) -> None:
        self.gate = Router(build)
        self.shared_experts = SharedExperts(build)
        self.experts = FusedMoE(
            EXPERTS, HIDDEN, INNER, DEEPSEEK, build, correction_bias=self.gate.e_score_correction_bias
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts.forward(x, self.gate.forward(x), self.shared_experts.forward(x))


def deepseek_reference() -> Any:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    config: Any = DeepseekV3Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        n_group=DEEPSEEK.num_groups,
        topk_group=DEEPSEEK.topk_groups,
        routed_scaling_factor=DEEPSEEK.scaling_factor,
        norm_topk_prob=True,
        experts_implementation="eager",
    )
    module = randomised(DeepseekV3MoE(config))
    module.gate.e_score_correction_bias.mul_(0.3)  # a larger bias would decide every selection
    return module


def deepseek_tensors(module: Any) -> dict[str, torch.Tensor]:
    """Return the module's tensors as checkpoints name them."""
    tensors = {name: tensor for name, tensor in module.state_dict().items() if not name.startswith("experts.")}
    for expert in range(EXPERTS):
        gate, up = module.experts.gate_up_proj[expert].chunk(2)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": module.experts.down_proj[expert]}
        tensors |= {f"experts.{expert}.{name}.weight": part for name, part in parts.items()}
    return tensors


@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_deepseek_moe_equals_transformers(tp_size: int) -> None:
    """Grouped sigmoid routing with a correction bias and shared experts. Two ranks do not divide the experts' columns."""
    reference = deepseek_reference()
    tensors = deepseek_tensors(reference)
    x = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(1))

    def run(communicator: Communicator) -> torch.Tensor:
        layer = DeepseekMoE(build_for(communicator))
        load(layer, tensors, {"gate_up_proj": ("gate_proj", "up_proj")})
        return layer.forward(x)

    expected = reference(x[None])[0]
    for found in run_ranks(tp_size, run):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_routing_equals_transformers() -> None:
    router = deepseek_reference().gate
    x = torch.randn(200, HIDDEN, generator=torch.Generator().manual_seed(2))
    logits, weights, ids = router(x)
    found = RoutingOps(torch.device("cpu"), torch.float32).route(logits, DEEPSEEK, router.e_score_correction_bias)
    expected = torch.zeros(200, EXPERTS).scatter_(1, ids, weights)
    torch.testing.assert_close(torch.zeros(200, EXPERTS).scatter_(1, found[1], found[0]), expected)
    assert len({tuple(sorted(row)) for row in ids.tolist()}) > 20, "the routes are all alike"


@pytest.mark.parametrize("tp_size", [1, 2, 3])
@pytest.mark.parametrize("kernel", [TorchMoe, NaiveMoe])
def test_gpt_oss_moe_equals_transformers(kernel: type[MoeKernel], tp_size: int) -> None:
    """The experts have biases and clamps; only rank 0 adds the bias of ``down``."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config: Any = GptOssConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS, swiglu_limit=1.0)
    reference = randomised(GptOssExperts(config))
    gate_up, bias = reference.gate_up_proj.mT, reference.gate_up_proj_bias
    tensors = {}
    for expert in range(EXPERTS):
        for name, weight, held in (
            ("gate_proj", gate_up[expert, ::2], bias[expert, ::2]),
            ("up_proj", gate_up[expert, 1::2], bias[expert, 1::2]),
            ("down_proj", reference.down_proj.mT[expert], reference.down_proj_bias[expert]),
        ):
            tensors |= {f"{expert}.{name}.weight": weight, f"{expert}.{name}.bias": held}
    random = torch.Generator().manual_seed(3)
    x, logits = torch.randn(30, HIDDEN, generator=random), torch.randn(30, EXPERTS, generator=random)

    def run(communicator: Communicator) -> torch.Tensor:
        layer = FusedMoE(
            EXPERTS,
            HIDDEN,
            INNER,
            RoutingSpec(TOP_K, renormalize=True),
            build_for(communicator, kernel),
            activation="swigluoai",
            bias=True,
            swiglu_limit=1.0,
        )
        load(layer, tensors, {})
        return layer.forward(x, logits)

    values, ids = logits.topk(TOP_K)
    weights = values.softmax(-1)  # equals a softmax over all, renormalized over the selected experts
    expected = reference(x, ids, weights)
    for found in run_ranks(tp_size, run):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_shared_experts_add_no_all_reduce() -> None:
    """Their output is added before the all-reduce of the routed experts, or before the one fused into the next norm."""

    class Counting(SingleRank):
        def __init__(self) -> None:
            self.rank, self.size, self.num_calls = 0, 2, 0

        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            self.num_calls += 1
            return 2 * x

    outputs = {}
    for reduce in (True, False):
        group = Counting()
        layer = FusedMoE(2, 4, 6, RoutingSpec(1, True), build_for(group), reduce=reduce)
        for _, target in layer.weight_targets("", {}):
            target.destination.fill_(1)
        layer.prepare()
        outputs[reduce] = layer.forward(torch.ones(3, 4), torch.zeros(3, 2), shared=torch.ones(3, 4))
        assert group.num_calls == int(reduce)
    assert torch.equal(outputs[True], 2 * outputs[False])
    alone = layer.forward(torch.ones(3, 4), torch.zeros(3, 2))
    assert torch.equal(outputs[False], alone + 1)


class PlainMoe(TorchMoe):
    capabilities = MoeCapabilities()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"activation": "gelu_tanh"}, "it supports the activations silu, not gelu_tanh"),
        ({"bias": True}, "it does not support biases of experts"),
        ({"swiglu_limit": 7.0}, "swiglu_limit=7.0"),
    ],
)
def test_unsupported_experts_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ProviderUnsupportedError, match=reason):
        FusedMoE(2, 4, 6, RoutingSpec(1, True), build_for(SingleRank(), PlainMoe), **options)


def test_quantized_experts_are_refused_by_a_kernel_without_them() -> None:
    plain = build_for(SingleRank(), PlainMoe)
    build = replace(plain, quantization=Fp8(QuantizationSpec(plain.dtype, plain.device, 2), plain.ops))
    layer = FusedMoE(2, 4, 6, RoutingSpec(1, True), build)
    with pytest.raises(ProviderUnsupportedError, match="weights must be float32, not float8_e4m3fn"):
        list(layer.weight_targets("experts", {}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring": "sparsemax"}, "scoring='sparsemax' is neither softmax nor sigmoid"),
        ({"num_groups": 5, "topk_groups": 1}, "num_groups=5 does not divide the 12 experts"),
        ({"num_groups": 0}, "num_groups=0 does not divide"),
        ({"topk_groups": 5}, "topk_groups=5 is not between 1 and num_groups=4"),
        ({"topk_groups": 0}, "topk_groups=0 is not between 1 and"),
        ({"topk_groups": 1}, "top_k=4 is not between 1 and 3, the experts of topk_groups=1"),
        ({"top_k": 0}, "top_k=0 is not between 1 and 6"),
    ],
)
def test_invalid_routing_is_refused(changes: dict[str, Any], message: str) -> None:
    check_routing(DEEPSEEK, EXPERTS)
    with pytest.raises(ModelFormatError, match=message):
        FusedMoE(EXPERTS, 4, 6, replace(DEEPSEEK, **changes), build_for(SingleRank()))


def test_routing_with_unknown_fields_is_refused() -> None:
    @dataclass(frozen=True)
    class NoisyRouting(RoutingSpec):
        noise: float = 0.1

    with pytest.raises(AssertionError, match="NoisyRouting"):
        check_routing(NoisyRouting(1, True), 2)
