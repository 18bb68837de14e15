from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from minisgl_backends.quantization.fp8 import Fp8
from minisgl_core.config.hf import model_config
from minisgl_core.config.resolve import quantization_spec
from minisgl_core.contracts.communicator import Communicator, SingleRank
from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.ops import Ops
from minisgl_core.contracts.weights import WeightGenerator, WeightTarget
from minisgl_core.testing.rank_threads import run_ranks
from minisgl_core.testing.references import DenseAttention, NaiveMoe
from minisgl_core.utils.fp8 import FP8
from minisgl_core.weights.dummy import DummyWeights
from minisgl_core.weights.loader import load_weights
from minisgl_models.qwen3_moe import Qwen3MoeForCausalLM


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    raw = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=53,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=6,
        head_dim=8,
    ).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(raw | {"architectures": ["Qwen3MoeForCausalLM"]}))
    return tmp_path


def logits(folder: Path, communicator: Communicator) -> torch.Tensor:
    source, device = DummyWeights(folder), torch.device("cpu")
    build = BuildContext(communicator, Ops.of(device, torch.float32), device, torch.float32, NaiveMoe)
    model = Qwen3MoeForCausalLM(model_config(source.config), build)
    load_weights(model, source, progress=False)
    ids = torch.arange(20)
    with torch.inference_mode():
        return model.gather_logits(model.compute_logits(model.forward(ids, ids, DenseAttention())))


def test_logits_of_dummy_weights_are_finite_and_deterministic(folder: Path) -> None:
    first, second = (run_ranks(1, lambda c: logits(folder, c))[0] for _ in range(2))
    assert torch.equal(first, second)
    assert 0.001 < first.std() < 10
    assert (first - first[0]).abs().max() > 0.01, "positions differ"


def test_ranks_have_equal_logits(folder: Path) -> None:
    results = run_ranks(4, lambda c: logits(folder, c))
    assert all(torch.equal(result, results[0]) for result in results)


def test_views_and_large_tensors_are_filled(folder: Path) -> None:
    source = DummyWeights(folder)
    assert isinstance(source, WeightGenerator)
    matrix = torch.zeros(3, 10)
    source.generate("a.weight", WeightTarget(matrix[:, :7]))
    assert matrix[:, :7].ne(0).all()
    assert matrix[:, 7:].eq(0).all()
    long = torch.zeros(2_100, 4_000)
    source.generate("b.weight", WeightTarget(long))
    assert long.std() == pytest.approx(0.02, rel=0.01)
    assert abs(long.mean()) < 1e-4
    assert torch.unique(long[:, 0]).numel() > 2_000, "rows differ"


def test_shards_of_a_tensor_differ(folder: Path) -> None:
    source, parts = DummyWeights(folder), [torch.zeros(4, 4), torch.zeros(4, 4)]
    for rank, part in enumerate(parts):
        source.generate("a.weight", WeightTarget(part, (slice(4 * rank, 4 * rank + 4),)))
    assert not torch.equal(*parts)


def test_quantized_weights_and_scales_have_usual_magnitudes(folder: Path) -> None:
    """Codes times scales are about as large as other weights, for FP8 and for integers."""
    source = DummyWeights(folder)
    codes, scales = torch.zeros(500, 400, dtype=FP8), torch.zeros(500, 1)
    source.generate("a.weight", WeightTarget(codes))
    source.generate("a.weight_scale", WeightTarget(scales))
    assert (codes.float() * scales).std() == pytest.approx(0.02, rel=0.02)
    exponents = torch.zeros(3, 4, dtype=torch.uint8)
    source.generate("experts.down_proj_scales", WeightTarget(exponents))
    assert (2.0 ** (exponents.float() - 127) == 2**-6).all()
    packed = torch.zeros(500, 400, dtype=torch.int32)
    source.generate("a.qweight", WeightTarget(packed))
    assert packed.unique().numel() > 190_000
    assert packed.min() < -(2**30)
    groups = torch.arange(64, dtype=torch.int32) // 32
    source.generate("a.g_idx", WeightTarget(groups))
    assert groups.equal(torch.arange(64) // 32), "the layer has initialized them"


@pytest.mark.parametrize(
    "quantization", [{"quant_method": "fp8"}, {"quant_method": "fp8", "weight_block_size": [16, 24]}]
)
def test_dummy_fp8_models_have_usual_logits(folder: Path, quantization: dict[str, object]) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": quantization}))
    source, device = DummyWeights(folder), torch.device("cpu")
    config, ops = model_config(source.config), Ops.of(device, torch.float32)
    provider = Fp8(quantization_spec(config, torch.float32, device), ops)
    build = BuildContext(SingleRank(), ops, device, torch.float32, NaiveMoe, quantization=provider)
    model = Qwen3MoeForCausalLM(config, build)
    names = {name for name, _ in model.weight_targets("", model.fused_projections)}
    assert "model.layers.1.mlp.experts.3.down_proj.weight_scale" in names
    assert "lm_head.weight_scale" not in names
    load_weights(model, source, progress=False)
    ids = torch.arange(20)
    with torch.inference_mode():
        found = model.compute_logits(model.forward(ids, ids, DenseAttention()))
    assert 0.001 < found.std() < 10


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    assert DummyWeights.unsupported(tmp_path) == ["the folder has no config.json"]
    assert DummyWeights.unsupported(tmp_path / "none") == ["it is not a folder"]
