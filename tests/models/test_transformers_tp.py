"""Tensor parallelism with `--model-impl transformers`: plans of transformers, stacked experts and latent attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_transformers_architectures import ARCHITECTURES, MLA, MOE, WITHOUT_PLAN
from torch import nn
from transformers_cases import config_of, saved, skip_if_unsupported

from minisgl_core.config.hf import model_config
from minisgl_core.contracts.communicator import Communicator, SingleRank
from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.ops import Ops
from minisgl_core.errors import InvalidValueError
from minisgl_core.layers import ReplicatedLinear
from minisgl_core.testing.rank_threads import run_ranks
from minisgl_core.testing.references import DenseAttention, NaiveMoe, random_reference
from minisgl_core.weights.loader import load_weights
from minisgl_core.weights.safetensors_folder import SafetensorsWeights
from minisgl_models.transformers_backend.expert_shards import shard_experts
from minisgl_models.transformers_backend.model import TransformersModel
from minisgl_models.transformers_backend.parallel import LinearModule

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, changes) for name, changes in ARCHITECTURES.items() if name not in WITHOUT_PLAN},
    # Queries have no low-rank projection in DeepSeek-V2-Lite.
    "deepseek_v2-lite": ("deepseek_v2", ARCHITECTURES["deepseek_v2"] | {"q_lora_rank": None}),
    "deepseek_v3-lite": ("deepseek_v3", ARCHITECTURES["deepseek_v3"] | {"q_lora_rank": None, "attention_bias": True}),
    "phi3": ("phi3", {}),  # whole inputs and outputs of all its linear layers
    "glm-uneven": ("glm", {"intermediate_size": 49}),  # the last rank has padding
    "qwen2_moe": ("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 16}),
    "qwen3_moe": ("qwen3_moe", MOE),
    "mixtral": ("mixtral", MOE),
}
IDS = torch.arange(3, 23)


class FakeRank(SingleRank):
    """First of several ranks, for models that are only built."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size


def context(communicator: Communicator) -> BuildContext:
    device, dtype = torch.device("cpu"), torch.float32
    return BuildContext(communicator, Ops.of(device, dtype), device, dtype, NaiveMoe)


def built(source: SafetensorsWeights, communicator: Communicator) -> TransformersModel:
    config = model_config(TransformersModel.standard_config(source.config))
    return TransformersModel(config, context(communicator))


def checkpoint(model_type: str, changes: dict[str, Any], folder: Path) -> tuple[Any, SafetensorsWeights]:
    skip_if_unsupported(model_type, needs_plan=model_type not in WITHOUT_PLAN)
    reference = random_reference(config_of(model_type, **{"num_hidden_layers": 2, "head_dim": 8, **changes}))
    return reference, SafetensorsWeights(Path(saved(reference, folder)))


@pytest.mark.parametrize("case", CASES)
def test_logits_of_two_ranks_equal_transformers(case: str, tmp_path: Path) -> None:
    reference, source = checkpoint(*CASES[case], tmp_path)

    def run(communicator: Communicator) -> torch.Tensor:
        model = built(source, communicator)
        load_weights(model, source, progress=False)
        with torch.inference_mode():
            return model.compute_logits(model.forward(IDS, torch.arange(len(IDS)), DenseAttention()))

    first, second = run_ranks(2, run)
    with torch.inference_mode():
        expected = reference(IDS[None], use_cache=False).logits[0]
    assert torch.equal(first, second)
    torch.testing.assert_close(first, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", ["deepseek_v3", "aria_text"])  # experts are stored one by one, or stacked
def test_a_rank_loads_only_its_part_of_experts_and_latent_attention(case: str, tmp_path: Path) -> None:
    _, source = checkpoint(*CASES[case], tmp_path)
    whole, sharded = (_loaded_elements(built(source, FakeRank(size))) for size in (1, 2))
    assert sharded.keys() == whole.keys()
    split = (".experts.", ".mlp.", "self_attn.q_b_proj", "self_attn.kv_b_proj", "o_proj")
    replicated = ("gate.weight", "router.weight", "gate.e_score_correction_bias")
    names = [name for name in whole if any(each in name for each in split) and not name.endswith(replicated)]
    assert sum(".experts." in name for name in names) > 1
    assert {name: sharded[name] * 2 for name in names} == {name: whole[name] for name in names}


def _loaded_elements(model: TransformersModel) -> dict[str, int]:
    elements: dict[str, int] = {}
    for name, target in model.weight_targets("", {}):
        elements[name] = elements.get(name, 0) + target.destination.numel()
    return elements


@pytest.mark.parametrize("model_type", sorted(WITHOUT_PLAN))
def test_models_without_a_plan_are_refused(model_type: str, tmp_path: Path) -> None:
    _, source = checkpoint(model_type, ARCHITECTURES[model_type], tmp_path)
    with pytest.raises(InvalidValueError, match=r"--tp=2 .*has no tensor-parallel plan"):
        built(source, FakeRank(2))


def test_ranks_that_do_not_divide_the_experts_are_refused(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    _, source = checkpoint("deepseek_v3", {**MOE, **MLA, **heads, "moe_intermediate_size": 24}, tmp_path)
    size = r"must be a divisor of 24, the intermediate size of model\.layers\.1\.mlp\.experts\.gate_up_proj"
    with pytest.raises(InvalidValueError, match=f"--tp=16 .*{size}"):
        built(source, FakeRank(16))


@pytest.mark.parametrize(
    ("module", "style", "reason"),
    [
        ("experts.down_proj", "new", r"experts\.down_proj of the experts has 3 dimensions and the style 'new'"),
        ("experts.down_proj", "replicate", "of the experts has 3 dimensions and the style 'replicate'"),
        ("experts.gate_up_proj", "colwise", r"shards .*experts\.gate_up_proj as one matrix, and checkpoints store 2"),
        ("shared_experts.up_proj", "new", r"shared_experts\.up_proj has the style 'new', which minisgl does not know"),
        (
            "shared_experts",
            "all_reduce",
            "has 'all_reduce' for .* neither a linear layer nor a weight of stacked experts",
        ),
        ("shared_experts", "moe_tp_experts", r"mlp\.shared_experts, whose weights are not stacked parameters"),
        ("experts", "replicate", r"has 'packed_colwise' for .*experts\.gate_up_proj, which is neither"),
    ],
)
def test_unknown_styles_are_refused(
    module: str, style: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, source = checkpoint(*CASES["deepseek_v3"], tmp_path)
    kind = type(reference.config)
    monkeypatch.setattr(kind, "base_model_tp_plan", kind.base_model_tp_plan | {f"layers.*.mlp.{module}": style})
    with pytest.raises(InvalidValueError, match=f"--tp=2 .*{reason}"):
        built(source, FakeRank(2))


def module_with_weight() -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(1, 8, 8, device="meta"))
    return module


def replaced_linear() -> nn.Module:
    layer = ReplicatedLinear(8, 8, context(FakeRank(2)))
    return LinearModule(layer, torch.empty(8, 8, device="meta"))


@pytest.mark.parametrize(
    ("has_stacked", "expert"),
    [(False, nn.Identity), (False, module_with_weight), (True, module_with_weight), (True, replaced_linear)],
)
def test_experts_that_are_modules_of_their_own_are_refused(has_stacked: bool, expert: Callable[[], nn.Module]) -> None:
    model = nn.Module()
    model.experts = nn.ModuleList([expert() for _ in range(2)])
    if has_stacked:
        model.experts.down_proj = nn.Parameter(torch.empty(2, 8, 8, device="meta"))
    plan = {"experts": "moe_tp_experts", "experts.*.weight": "colwise", "experts.down_proj": "rowwise"}
    with pytest.raises(InvalidValueError, match="for experts, whose weights are not stacked parameters"):
        shard_experts(model, plan, context(FakeRank(2)))
