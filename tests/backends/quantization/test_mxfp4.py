"""Experts in MXFP4, compared with the format's definition in float64 and with transformers' dequantization."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minisgl_backends.moe.packed_weights import dequantize
from minisgl_backends.moe.torch_kernel import TorchMoe
from minisgl_backends.quantization.fp8 import Fp8
from minisgl_backends.quantization.int4 import Int4
from minisgl_backends.quantization.mxfp4 import Mxfp4
from minisgl_core.contracts.checkpoint_quantization import CheckpointQuantization
from minisgl_core.contracts.layer_methods import ExpertsSpec
from minisgl_core.contracts.moe import MoeKernel, MoeSpec
from minisgl_core.contracts.ops import Ops
from minisgl_core.contracts.quantization import Quantization, QuantizationSpec
from minisgl_core.contracts.shard import Shard
from minisgl_core.errors import ProviderUnsupportedError
from minisgl_core.testing.moe_cases import activated
from minisgl_core.testing.references import NaiveMoe
from minisgl_core.weights.loader import fill_target

CPU = torch.device("cpu")
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def known(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantize [..., blocks, 16] one code at a time, in float64."""
    values = torch.zeros(*blocks.shape[:-1], 32, dtype=torch.float64)
    for place in range(32):
        codes = blocks[..., place // 2].int() >> (4 * (place % 2)) & 15
        values[..., place] = torch.tensor([*E2M1, *(-each for each in E2M1)], dtype=torch.float64)[codes]
    return (values * 2.0 ** (scales.double() - 127)[..., None]).flatten(-2)


@given(st.integers(0, 255))
def test_every_code_and_scale(scale: int) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    scales = torch.full((1, 16), scale, dtype=torch.uint8)
    found = dequantize(blocks.flatten(1), scales, None, torch.float32)
    if scale == 255:
        assert found.isnan().all()
    else:
        wide = known(blocks, scales)
        torch.testing.assert_close(found, wide.float(), rtol=0, atol=0)


def test_transformers_dequantizes_to_the_same_weights() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = tensors()["e.gate_up_proj_blocks"], tensors()["e.gate_up_proj_scales"]
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    for expert, each in enumerate(expected):
        found = dequantize(blocks[expert].flatten(1), scales[expert], None, torch.bfloat16)
        assert torch.equal(found, each.to(torch.bfloat16))


def tensors(hidden: int = 64, inner: int = 96) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    found: dict[str, torch.Tensor] = {}
    for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        blocks = -(-columns // 32)
        found[f"e.{name}_blocks"] = torch.randint(256, (3, rows, blocks, 16), generator=random, dtype=torch.uint8)
        found[f"e.{name}_scales"] = torch.randint(121, 126, (3, rows, blocks), generator=random, dtype=torch.uint8)
        found[f"e.{name}_bias"] = torch.randn(3, rows, generator=random)
    return found


def operation(given: dict[str, torch.Tensor], inner: Shard, adds_bias: bool, kernel: type[MoeKernel]) -> Any:
    provider = Mxfp4(
        QuantizationSpec(torch.float32, CPU, 3, CheckpointQuantization(CONFIG)), Ops.of(CPU, torch.float32)
    )
    moe = MoeSpec(3, 2, 64, inner.size, torch.float32, CPU, "swigluoai", has_bias=True, swiglu_limit=7.0)
    method = provider.experts(ExpertsSpec("e", moe, inner, ("", "", ""), adds_bias, True), kernel)
    for name, target in method.targets():
        fill_target(name, given[name], target)
    return method.prepare()


@pytest.mark.parametrize("kernel", [NaiveMoe, TorchMoe])
@pytest.mark.parametrize(("inner", "ranks"), [(96, 1), (96, 2), (96, 5), (32, 20)])
def test_outputs_of_ranks_sum_to_the_layer(inner: int, ranks: int, kernel: type[MoeKernel]) -> None:
    """Gate and up alternate in the checkpoint. Shards begin within blocks of 32 inputs, and the last one may be empty."""
    given, x = tensors(inner=inner), torch.randn(5, 64)
    weights, ids = torch.rand(5, 2), torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]])
    gate_up, down = (
        known(given[f"e.{name}_blocks"], given[f"e.{name}_scales"]) for name in ("gate_up_proj", "down_proj")
    )
    both = torch.einsum("th,enh->ten", x.double(), gate_up) + given["e.gate_up_proj_bias"].double()
    spec = MoeSpec(3, 2, 64, inner, torch.float64, CPU, "swigluoai", has_bias=True, swiglu_limit=7.0)
    hidden = activated(both[..., 0::2], both[..., 1::2], spec.activation, spec.swiglu_limit)
    outputs = torch.einsum("ten,ehn->teh", hidden, down) + given["e.down_proj_bias"].double()
    expected = (outputs.gather(1, ids[..., None].expand(-1, -1, 64)) * weights.double()[..., None]).sum(1)
    found = torch.zeros(5, 64, dtype=torch.float64)
    for rank in range(ranks):
        shard = Shard.of(inner, rank, ranks)
        found += operation(given, shard, rank == 0, kernel)(x, weights, ids).double()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_unsupported_checkpoints_and_experts_are_refused() -> None:
    stored = CheckpointQuantization(CONFIG)
    spec = QuantizationSpec(torch.float32, CPU, 3, stored)
    assert Mxfp4.unsupported(spec) == []
    [reason] = Mxfp4.unsupported(QuantizationSpec(torch.float32, CPU, 3))
    assert (
        "weights (no quantization_config) are not in MXFP4; this provider loads quant_method 'mxfp4'; use --quantization"
        in reason
    )
    assert "are not float8" in Fp8.unsupported(spec)[0]
    experts = ExpertsSpec("e", MoeSpec(3, 2, 64, 32, torch.float32, CPU), Shard.whole(32), ("a", "b", "c"))
    with pytest.raises(ProviderUnsupportedError, match=r"'mxfp4' cannot .* e has a tensor per expert; only all"):
        Mxfp4(spec, Ops.of(CPU, torch.float32)).experts(experts, TorchMoe)


@pytest.mark.parametrize(("provider", "name"), [(Fp8, "fp8"), (Int4, "int4")])
def test_other_providers_refuse_stacked_experts_by_name(provider: type[Quantization], name: str) -> None:
    experts = ExpertsSpec(
        "e", MoeSpec(3, 2, 64, 32, torch.float32, CPU), Shard.whole(32), ("a", "b", "c"), is_stacked=True
    )
    method = provider(QuantizationSpec(torch.float32, CPU, 3), Ops.of(CPU, torch.float32))
    with pytest.raises(ProviderUnsupportedError, match=f"quantization provider '{name}' cannot"):
        method.experts(experts, TorchMoe)
