"""Order in which providers see a checkpoint's config, and cleanup after a failed start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from minisgl_backends.attention.torch_backend import TorchAttention
from minisgl_core.config.options import EngineConfig
from minisgl_core.contracts.communicator import Communicator, CommunicatorSpec, SingleRank
from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.engine.build import build_model_runner, resolve_options
from minisgl_core.engine.checkpoint import model_provider, open_checkpoint
from minisgl_core.errors import (
    InvalidValueError,
    ModelFormatError,
    PluginError,
    ProviderLoadError,
    ProviderNotFoundError,
)
from minisgl_core.layers import Attention
from minisgl_core.plugins.hooks import Hooks
from minisgl_core.plugins.kinds import KINDS
from minisgl_core.plugins.registry import Entry, Registry
from minisgl_core.runtime.worker import make_loop
from minisgl_core.sampling_params import SamplingParams
from minisgl_core.testing.references import DenseAttention
from minisgl_models.llama import LlamaForCausalLM


class RenamesConfigKeys(LlamaForCausalLM):
    @classmethod
    def standard_config(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**raw, "num_hidden_layers": raw["n_layer"], "intermediate_size": 4 * raw["hidden_size"]}


def with_config(folder: Path, **changes: Any) -> EngineConfig:
    raw = json.loads((tiny.checkpoint() / "config.json").read_text()) | changes
    raw = {key: value for key, value in raw.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "model.safetensors").symlink_to(tiny.checkpoint() / "model.safetensors")
    return EngineConfig.from_flat(model=str(folder), platform="cpu", ops="torch", dtype="float32")


def test_an_architecture_without_a_provider_is_named(tmp_path: Path) -> None:
    config = with_config(tmp_path, architectures=["GPT2LMHeadModel"], hidden_size=..., num_hidden_layers=...)
    config = config.with_flat(model_impl="minisgl")
    with pytest.raises(ProviderNotFoundError, match=r"no model is called 'GPT2LMHeadModel' \(installed: .*Llama"):
        open_checkpoint(config, tiny.registry())


def test_auto_falls_back_to_transformers_without_a_provider() -> None:
    registry = tiny.registry()
    assert model_provider("auto", "LlamaForCausalLM", registry) == ("LlamaForCausalLM", "")
    assert model_provider("transformers", "LlamaForCausalLM", registry) == ("transformers", "set by the user")
    assert model_provider("minisgl", "GPT2LMHeadModel", registry) == ("GPT2LMHeadModel", "")
    name, reason = model_provider("auto", "GPT2LMHeadModel", registry)
    assert (name, reason.partition(";")[0]) == ("transformers", "no provider is installed for GPT2LMHeadModel")


def test_a_model_translates_its_config_keys(tmp_path: Path) -> None:
    config = with_config(
        tmp_path, architectures=["Other"], num_hidden_layers=..., intermediate_size=..., n_layer=5, eos_token_id=3
    )
    shipped = Registry.from_environment()
    entries = [*shipped.entries("weights"), Entry("models", "Other", f"{__name__}:RenamesConfigKeys", "own", "1")]
    checkpoint = open_checkpoint(config, Registry(entries))
    assert (checkpoint.config.num_layers, checkpoint.config.intermediate_size) == (5, 96)
    assert checkpoint.model_class is RenamesConfigKeys


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"attn_logit_softcapping": 50.0}, "soft cap of 50 .attn_logit_softcapping., which no attention layer has"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "the rotary embedding is of the kind per_layer"),
        (
            {"rope_parameters": {"rope_type": "su", "rope_theta": 1e4}},
            "the rotary embedding is of the kind su",
        ),
    ],
)
def test_config_features_that_no_layer_supports_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFormatError, match=message):
        build_model_runner(with_config(tmp_path, **changes), tiny.registry(), Hooks(), progress=False)


@pytest.mark.parametrize(("context", "factors"), [(16, "short_factor"), (17, "long_factor")])
def test_longrope_factors_follow_the_served_context(context: int, factors: str, tmp_path: Path) -> None:
    raw = json.loads((tiny.checkpoint() / "config.json").read_text())
    pairs = raw["head_dim"] // 2
    rope = {"short_factor": [1.0] * pairs, "long_factor": [3.0] * pairs, "original_max_position_embeddings": 16}
    config = with_config(tmp_path, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "factor": 1.0, **rope})
    served = config.with_flat(num_pages=50, max_seq_len_override=context)
    cos = build_model_runner(served, tiny.registry(), Hooks(), progress=False).model_runner.model.model.rotary_emb.cos
    frequencies = 1.0 / (torch.tensor(rope[factors]) * 1e4 ** (torch.arange(pairs) / pairs))
    assert torch.allclose(cos, torch.outer(torch.arange(context), frequencies).cos(), atol=1e-5)


class CappedLlama(LlamaForCausalLM):
    """Llama with the soft cap of Gemma 2 on its attention scores."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        for index, layer in self.model.layers.items():
            layer.self_attn.attn = Attention(index, config.head_dim**-0.5, None, build, soft_cap=config.soft_cap)


def test_soft_caps_reach_the_attention_backend(tmp_path: Path) -> None:
    config = with_config(tmp_path, architectures=["Capped"], attn_logit_softcapping=0.2)
    shipped = tiny.registry()
    entries = [entry for kind in KINDS for entry in shipped.entries(kind)]
    registry = Registry([*entries, Entry("models", "Capped", f"{__name__}:CappedLlama", "own", "1")])
    built = build_model_runner(
        config.with_flat(num_pages=50, max_seq_len_override=48), registry, Hooks(), progress=False
    )
    assert built.model_runner.attention.capabilities.soft_cap
    loop, prompt = make_loop(built, registry, Hooks(), []), (5, 9, 3, 7, 11)
    tiny.submit(loop, "r", prompt, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    ids, model = list(prompt), built.model_runner.model
    with torch.inference_mode():
        for _ in range(8):
            hidden = model.forward(torch.tensor(ids), torch.arange(len(ids)), DenseAttention())
            ids.append(int(model.compute_logits(hidden[-1:]).argmax()))
    assert tiny.run(loop)["r"].tokens == ids[len(prompt) :]
    assert tuple(ids[len(prompt) :]) != tiny.greedy(prompt, 8), "the cap changes nothing"


class DeclaresWiderValueHeads(TorchAttention):
    capabilities = replace(TorchAttention.capabilities, value_head_dim=True)


class SupportsWiderValueHeads(LlamaForCausalLM):
    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        return []


def test_other_value_head_dims_are_refused(tmp_path: Path) -> None:
    config = with_config(tmp_path, architectures=["Wider"], v_head_dim=16).with_flat(attn="wider", num_pages=50)
    shipped = tiny.registry()
    entries = [entry for kind in KINDS for entry in shipped.entries(kind)]
    entries.append(Entry("attention", "wider", f"{__name__}:DeclaresWiderValueHeads", "own", "1"))
    registry = Registry([*entries, Entry("models", "Wider", f"{__name__}:SupportsWiderValueHeads", "own", "1")])
    with pytest.raises(ModelFormatError, match="stores keys and values of one head dimension"):
        build_model_runner(config, registry, Hooks(), progress=False)


class UsesTheOtherLayout(TorchAttention):
    """A backend that requires the other KV pool layout."""

    capabilities = replace(TorchAttention.capabilities, layouts=("NHD",))


def test_backends_without_a_common_layout_are_refused() -> None:
    shipped = tiny.registry()
    entries = [entry for kind in KINDS for entry in shipped.entries(kind)]
    registry = Registry([*entries, Entry("attention", "own", f"{__name__}:UsesTheOtherLayout", "own", "1")])
    config = EngineConfig.from_flat(model=str(tiny.checkpoint()), platform="cpu", dtype="float32", attn="own,torch")
    message = (
        r"--attn='own,torch' .*own supports NHD and torch supports HND"
        r".* own can be combined with .*triton.* torch can be combined with native\."
    )
    with pytest.raises(InvalidValueError, match=message):
        build_model_runner(config, registry, Hooks(), progress=False)


class RecordsCleanup(SingleRank):
    """Rank 0 of two ranks: records its cleanup calls, and raises an error in one of them."""

    provider_digest: object = None
    calls: list[str]

    def __init__(self, spec: CommunicatorSpec) -> None:
        self.rank, self.size, self.calls = spec.rank, spec.size, []

    def broadcast_object(self, value: object) -> object:
        return self.provider_digest or value

    def abort(self) -> None:
        self.calls.append("abort")
        raise RuntimeError("the other rank is gone")

    def close(self) -> None:
        self.calls.append("close")


class RanksThatDiffer(RecordsCleanup):
    provider_digest = "another"


def test_provider_names_are_separate_per_kind() -> None:
    shipped = [each for kind in KINDS for each in tiny.registry().entries(kind) if each.name != "native"]
    attention = Entry("attention", "native", f"{TorchAttention.__module__}:TorchAttention", "own", "1")
    registry = Registry([*shipped, attention, Entry("ops", "native", "no_such_module:Ops", "own", "1")])
    config = EngineConfig.from_flat(model=str(tiny.checkpoint()), platform="cpu", attn="native")
    *_, resolved = resolve_options(config, registry, Hooks())
    assert "native" not in resolved.config.backends.ops.split(",")
    with pytest.raises(ProviderLoadError, match="no_such_module"):
        resolve_options(config.with_flat(ops="native"), registry, Hooks())


def config_with_communicator(provider: type[Communicator]) -> tuple[EngineConfig, Registry]:
    config = EngineConfig.from_flat(
        model=str(tiny.checkpoint()), platform="cpu", ops="torch", dtype="float32", tp=2, communicator="own"
    )
    shipped = tiny.registry()
    entries = [entry for kind in KINDS for entry in shipped.entries(kind)]
    return config, Registry([*entries, Entry("communicator", "own", f"{__name__}:{provider.__name__}", "own", "1")])


@pytest.mark.parametrize(
    ("provider", "error"), [(RecordsCleanup, "no tensor of that kind"), (RanksThatDiffer, "resolved other providers")]
)
def test_a_failed_start_closes_the_communicator(
    provider: type[RecordsCleanup], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the start is raised, not that of the cleanup."""

    def fail(*args: Any) -> None:
        raise PluginError("no tensor of that kind")

    joined: list[Any] = []
    config, registry = config_with_communicator(provider)
    monkeypatch.setattr("minisgl_core.engine.build.load_weights", fail)
    with pytest.raises(PluginError, match=error):
        build_model_runner(config, registry, Hooks(), progress=False, on_joined=joined.append)
    [communicator] = joined
    assert communicator.calls == ["abort", "close"]


@pytest.mark.parametrize("is_equal", [False, True])
def test_an_lm_head_that_differs_from_the_embedding_is_used(is_equal: bool, tmp_path: Path) -> None:
    """The engine ties the weights only if the checkpoint has no other LM head, as transformers does."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    reference = tiny.reference_model()
    weights = dict(reference.state_dict())
    embedding = weights.pop("model.embed_tokens.weight")
    if is_equal:
        weights["lm_head.weight"] = embedding.clone()
    raw = json.loads((tiny.checkpoint() / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file({"model.embed_tokens.weight": embedding}, tmp_path / "model-1.safetensors", metadata={"format": "pt"})
    save_file(weights, tmp_path / "model-2.safetensors", metadata={"format": "pt"})
    files = dict.fromkeys(weights, "model-2.safetensors") | {"model.embed_tokens.weight": "model-1.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    config = EngineConfig.from_flat(model=str(tmp_path), platform="cpu", ops="torch", dtype="float32")
    built = build_model_runner(config, tiny.registry(), Hooks(), progress=False)
    assert built.checkpoint.config.tie_embeddings == is_equal
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    hidden = torch.randn(3, 24)
    logits = built.model_runner.model.compute_logits(hidden)
    assert torch.allclose(logits, loaded.lm_head(hidden), atol=1e-5)
