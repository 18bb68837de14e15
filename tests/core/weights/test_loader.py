from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_core.config.hf import model_config
from minisgl_core.contracts.communicator import SingleRank
from minisgl_core.contracts.layer import FusedProjections, Targets
from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.contracts.ops import Ops
from minisgl_core.contracts.weights import LazyTensor, WeightSource, WeightTarget
from minisgl_core.errors import ModelFormatError
from minisgl_core.weights.loader import fill_target, has_other_lm_head, load_weights
from minisgl_models.llama import LlamaForCausalLM

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}


class InMemory(WeightSource):
    def __init__(self, tensors: Mapping[str, torch.Tensor], **changes: Any) -> None:
        self._tensors, self._changes = tensors, changes

    @classmethod
    def unsupported(cls, path: Path) -> list[str]:
        return ["it is in memory"]

    @property
    def config(self) -> Mapping[str, Any]:
        return {**CONFIG, **self._changes}

    def tokenizer(self) -> Any:
        raise NotImplementedError

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, LazyTensor]]:
        yield from self._tensors.items()


class FakeRank(SingleRank):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def model_for(
    source: WeightSource,
    rank: int = 0,
    tp_size: int = 1,
    model_class: Any = LlamaForCausalLM,
    layers: range | None = None,
) -> LlamaForCausalLM:
    device, dtype = torch.device("cpu"), torch.float32
    build = BuildContext(FakeRank(rank, tp_size), Ops.of(device, dtype), device, dtype, layers=layers)
    return model_class(model_config(source.config), build)


def checkpoint(**changes: Any) -> dict[str, torch.Tensor]:
    model = model_for(InMemory({}, **changes))
    targets = model.weight_targets("", model.fused_projections)
    return {name: torch.randn(target.destination.shape) for name, target in targets}


def test_missing_and_unexpected_tensors_are_named() -> None:
    tensors = checkpoint()
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(8)
    source = InMemory(tensors)
    with pytest.raises(ModelFormatError) as error:
        load_weights(model_for(source), source)
    assert str(error.value) == (
        "the checkpoint does not fit its config: model.norm.weight is missing; "
        "model.layers.0.self_attn.q_proj.bias is in the checkpoint but not in LlamaForCausalLM"
    )


@pytest.mark.parametrize("name", ["unknown.weight", "model.layers.1.mlp.unknown.weight"])
def test_stages_refuse_tensors_of_no_stage(name: str) -> None:
    source = InMemory(checkpoint() | {name: torch.zeros(8)})
    with pytest.raises(ModelFormatError, match=f"{name} is in the checkpoint but not in LlamaForCausalLM"):
        load_weights(model_for(source, layers=range(1, 2)), source)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layers", [range(1), range(1, 2), range(2), range(2, 3), range(3)])
def test_stages_load_only_their_layers(layers: range, tied: bool) -> None:
    changes = {"num_hidden_layers": 3, "tie_word_embeddings": tied}
    source = InMemory(checkpoint(**changes), **changes)
    model = model_for(source, layers=layers)
    targets = dict(model.weight_targets("", model.fused_projections))
    assert {int(name.split(".")[2]) for name in targets if ".layers." in name} == set(layers)
    is_first, is_last = 0 in layers, 2 in layers
    ends = {name for name in targets if ".layers." not in name}
    assert ends == {
        *(["model.embed_tokens.weight"] if is_first or (is_last and tied) else []),
        *(["model.norm.weight"] if is_last else []),
        *(["lm_head.weight"] if is_last and not tied else []),
    }
    load_weights(model, source)
    index = layers[0]
    kept = model.model.layers[index].input_layernorm.weight
    assert torch.equal(kept, dict(source.tensors(model.config))[f"model.layers.{index}.input_layernorm.weight"])


@pytest.mark.parametrize("layers", [range(0), range(1, 3), range(-1, 1)])
def test_layer_ranges_outside_the_model_are_refused(layers: range) -> None:
    with pytest.raises(AssertionError, match="of 2 layers"):
        model_for(InMemory({}), layers=layers)


def test_errors_count_many_missing_tensors() -> None:
    source = InMemory({})
    with pytest.raises(ModelFormatError, match=r"model\.layers\.0\.mlp\.gate_proj\.weight and 16 more are missing"):
        load_weights(model_for(source), source)


@pytest.mark.parametrize("shape", [(9, 8), (10, 9), (8,), (12, 8, 1), (13, 8)])
def test_wrong_shapes_are_named(shape: tuple[int, ...]) -> None:
    source = InMemory({**checkpoint(), "model.layers.1.mlp.gate_proj.weight": torch.zeros(shape)})
    with pytest.raises(ModelFormatError, match=r"layers\.1\.mlp\.gate_proj\.weight has shape"):
        load_weights(model_for(source), source)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.mlp.up_proj.bias",
        "model.layers.0.mlp.down_proj.weight",
        "lm_head.weight",
    ],
)
def test_too_large_tensors_are_refused_on_every_rank(name: str, rank: int) -> None:
    """A rank refuses the tensor even if its own shard is inside."""
    tensors = checkpoint(mlp_bias=True)
    right = list(tensors[name].shape)
    larger = torch.zeros([size + 4 for size in right])
    source = InMemory({**tensors, name: larger}, mlp_bias=True)
    with pytest.raises(ModelFormatError) as error:
        load_weights(model_for(source, rank, tp_size=2), source)
    assert str(error.value) == (
        f"the checkpoint does not fit its config: {name} has shape {list(larger.shape)}; the model expects {right}"
    )


class NamesNoShapes(LlamaForCausalLM):
    def weight_targets(self, name: str, fused_projections: FusedProjections) -> Targets:
        for each, target in super().weight_targets(name, fused_projections):
            yield each, WeightTarget(target.destination, target.index)


@pytest.mark.parametrize("stored", [torch.tensor(0.5), torch.tensor([0.5])])
def test_scalars_load_from_no_or_one_dimension(stored: torch.Tensor) -> None:
    scalar = torch.zeros(())
    fill_target("beta", stored, WeightTarget(scalar, shape=()))
    assert scalar == 0.5
    with pytest.raises(ModelFormatError, match=r"beta has shape \[2\]"):
        fill_target("beta", torch.zeros(2), WeightTarget(scalar, shape=()))


def test_targets_without_a_shape_check_only_the_shard() -> None:
    name = "model.layers.0.mlp.gate_proj.weight"
    source = InMemory({**checkpoint(), name: torch.zeros(11, 8)})
    load_weights(model_for(source, 0, 2, NamesNoShapes), source)
    with pytest.raises(
        ModelFormatError, match=r"has shape \[11, 8\], of which this rank takes \[6:12\]; .* \[6, 8\] there"
    ):
        load_weights(model_for(source, 1, 2, NamesNoShapes), source)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantized_weights_are_not_cast(dtype: torch.dtype) -> None:
    """A layer in the model's dtype must not load FP8 or integer codes as weights."""
    name = "model.layers.0.self_attn.o_proj.weight"
    source = InMemory({**checkpoint(), name: torch.ones(8, 8).to(dtype)})
    with pytest.raises(
        ModelFormatError, match=rf"{name} is {str(dtype)[6:]}, and its layer takes float32; --quantization"
    ):
        load_weights(model_for(source), source)
    source = InMemory({**checkpoint(), name: torch.ones(8, 8).bfloat16()})
    load_weights(model_for(source), source)


def test_single_values_are_broadcast_to_their_target() -> None:
    for held, stored in ((torch.zeros(3, 1), torch.tensor(5.0)), (torch.zeros(4), torch.tensor([[5.0]]))):
        fill_target("scale", stored, WeightTarget(held, (slice(1, 4),), shape=(9, 1), broadcast=True))
        assert (held == 5).all()
    rows = torch.zeros(3, 1)
    fill_target("scale", torch.arange(9.0)[:, None], WeightTarget(rows, (slice(1, 4),), shape=(9, 1), broadcast=True))
    assert rows.flatten().tolist() == [1, 2, 3]
    with pytest.raises(ModelFormatError, match="the model expects"):
        fill_target("scale", torch.zeros(2, 1), WeightTarget(rows, (slice(1, 4),), shape=(9, 1), broadcast=True))


def test_ignored_tensors_of_architectures_raise_no_error() -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4), "lm_head.weight": torch.zeros(11, 8)}
    source = InMemory({**checkpoint(tie_word_embeddings=True), **extra}, tie_word_embeddings=True)
    load_weights(model_for(source), source)


def test_tied_embeddings_share_one_tensor() -> None:
    source = InMemory(checkpoint(tie_word_embeddings=True), tie_word_embeddings=True)
    model = model_for(source)
    assert "lm_head.weight" not in [name for name, _ in model.weight_targets("", model.fused_projections)]
    load_weights(model, source)
    hidden = torch.randn(3, 8)
    assert torch.allclose(model.compute_logits(hidden), hidden @ model.model.embed_tokens.weight.T)


MEASURE = """
import sys, threading, time
from pathlib import Path
import torch
from minisgl_core.config.hf import model_config
from minisgl_core.contracts.communicator import SingleRank
from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.ops import LinearOps, Ops
from minisgl_core.weights.loader import load_weights
from minisgl_models.llama import LlamaForCausalLM
from minisgl_core.weights.safetensors_folder import SafetensorsWeights

class Rank(SingleRank):
    def __init__(self):
        self.rank, self.size = 1, 2

class Packing(LinearOps):
    def prepare_linear(self, weight, bias):
        packed = weight.clone()
        return lambda x: x @ packed.T

def anonymous():
    line = next(l for l in open("/proc/self/status") if l.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

torch.set_num_threads(1)
source, device = SafetensorsWeights(Path(sys.argv[1])), torch.device("cpu")
config = model_config(source.config)
providers = {"plain": [], "packing": [Packing]}[sys.argv[2]]
build = BuildContext(Rank(), Ops.of(device, torch.float32, *providers), device, torch.float32)
before, peak, stop = anonymous(), 0, False

def watch():
    global peak
    while not stop:
        peak = max(peak, anonymous())
        time.sleep(0.0005)

thread = threading.Thread(target=watch, daemon=True)
thread.start()
model = LlamaForCausalLM(config, build)
sizes = [target.destination.nbytes for _, target in model.weight_targets("", model.fused_projections)]
shard, largest = sum(sizes), max(sizes)
load_weights(model, source)
stop = True
thread.join()
print(peak - before, shard, largest)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("ops", ["plain", "packing"])
def test_peak_memory_is_little_more_than_the_shard(ops: str, tmp_path: Path) -> None:
    """This holds for kernels that repack weights, too: each matrix is freed before the next is packed."""
    from transformers import LlamaConfig

    from minisgl_core.testing.references import random_reference

    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        max_position_embeddings=64,
    )
    random_reference(config).save_pretrained(tmp_path, max_shard_size="60MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    done = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path), ops], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peak, shard, largest = map(int, done.stdout.split())
    assert shard > 60e6
    assert peak < 1.2 * shard + largest
    assert done.stderr == "", "no progress bar in a pipe"


@pytest.mark.parametrize(
    ("name", "prefix", "extra"),
    [
        ("model.embed_tokens.weight", "", {}),
        ("model.embed_tokens.weight", "", {"model.layers.2.embed_tokens.weight": torch.zeros(11, 8)}),
        ("language_model.model.embed_tokens.weight", "language_model.", {}),
        ("model.language_model.embed_tokens.weight", "", {}),
    ],
    ids=["llama", "multi-token prediction", "multimodal", "multimodal by modules"],
)
def test_lm_heads_are_compared_with_the_embedding(name: str, prefix: str, extra: dict[str, torch.Tensor]) -> None:
    embedding = torch.arange(88.0).view(11, 8)
    tensors = {name: embedding, **extra}
    config = model_config(CONFIG)
    assert not has_other_lm_head(InMemory(tensors), config)
    assert not has_other_lm_head(InMemory({**tensors, f"{prefix}lm_head.weight": embedding.clone()}), config)
    assert has_other_lm_head(InMemory({**tensors, f"{prefix}lm_head.weight": embedding + 1}), config)


def test_lm_heads_of_wrong_shapes_are_left_to_the_loader() -> None:
    tensors = {"model.embed_tokens.weight": torch.zeros(()), "lm_head.weight": torch.zeros(())}
    assert has_other_lm_head(InMemory(tensors), model_config(CONFIG))
