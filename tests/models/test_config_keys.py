"""Every config key of every registered architecture is followed, refused by name, or without effect, as in transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from config_cases import ALIASES, CASES, SIZES, WITHOUT_EFFECT, Case, Patch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from minisgl_core.config.hf import model_config
from minisgl_core.config.options import EngineConfig
from minisgl_core.config.resolve import attention_spec
from minisgl_core.contracts.attention import check_layers
from minisgl_core.contracts.communicator import SingleRank
from minisgl_core.contracts.model import BuildContext, Model
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.contracts.ops import Ops
from minisgl_core.engine.checkpoint import open_checkpoint
from minisgl_core.errors import MinisglError, ModelFormatError
from minisgl_core.plugins.registry import Registry
from minisgl_core.testing.references import DenseAttention, NaiveMoe, random_reference
from minisgl_core.weights.loader import load_weights
from minisgl_models.gemma2 import Gemma2ForCausalLM
from minisgl_models.gemma3 import Gemma3ForCausalLM, Gemma3ForConditionalGeneration
from minisgl_models.olmo3 import Olmo3ForCausalLM
from minisgl_models.phi3 import Phi3ForCausalLM

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()
torch.set_num_threads(1)
IDS = torch.arange(24) * 7 % 53
CPU = torch.device("cpu")
NUM_DRAWS = int(os.environ.get("MINISGL_CONFIG_DRAWS", "10"))
OTHER = {bool: lambda value: not value, int: lambda value: value + 1, float: lambda value: value + 0.5}


@lru_cache
def registry() -> Registry:
    return Registry.from_environment()


def shipped() -> list[str]:
    return sorted(each.name for each in registry().entries("models") if each.distribution == "minisgl-models")


class Outcome:
    """Logits for a ``config.json`` with random weights, by transformers and by the engine.

    Each is computed on first use, and is None if that side refuses the config.

    Attributes:
        reason: why the engine refuses it; empty if it does not.
    """

    def __init__(self, architecture: str, raw: Patch) -> None:
        self._text, self.reason = json.dumps({"architectures": [architecture], **raw}), ""
        provider = registry().load("models", architecture)
        try:
            config = model_config(provider.standard_config(json.loads(self._text)))
            self.reason = "; ".join(provider.unsupported(config))
        except MinisglError as error:
            self.reason = str(error)

    @cached_property
    def _model(self) -> Any:
        with TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(self._text)
            try:
                return random_reference(AutoConfig.from_pretrained(folder))
            except Exception:
                return None

    @cached_property
    @torch.inference_mode()
    def reference(self) -> torch.Tensor | None:
        try:
            return self._model and self._model(IDS[None]).logits[0]
        except Exception:
            return None

    @cached_property
    @torch.inference_mode()
    def logits(self) -> torch.Tensor | None:
        if self.reason:
            return None
        with TemporaryDirectory() as name:
            self._model.save_pretrained(name)
            Path(name, "config.json").write_text(self._text)
            try:
                return engine_logits(Path(name), IDS)
            except MinisglError as error:
                self.reason = str(error)
                return None

    def fault(self, keys: Iterable[str]) -> str:
        """Return a description of the error; empty if the logits are equal, or the refusal names one of the keys."""
        if any(key in self.reason for key in keys) or self.reference is None:
            return ""
        if self.logits is None:
            return "" if any(key in self.reason for key in keys) else f"refused without the key's name: {self.reason}"
        if self.logits.shape != self.reference.shape:
            return f"logits have the shape {tuple(self.logits.shape)}, in transformers {tuple(self.reference.shape)}"
        difference = float((self.logits - self.reference).abs().max())
        return (
            ""
            if difference <= 1e-4 * max(1.0, float(self.reference.abs().max()))
            else f"logits differ by {difference:g}"
        )


@lru_cache(maxsize=1)
def base_outcome(architecture: str) -> Outcome:
    return Outcome(architecture, CASES[architecture].raw({}))


def engine_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    options = EngineConfig.from_flat(model=str(folder), platform="cpu", ops="torch", dtype="float32")
    checkpoint = open_checkpoint(options, registry())
    config, source = checkpoint.config, checkpoint.source
    build = BuildContext(SingleRank(), Ops.of(CPU, torch.float32), CPU, torch.float32, NaiveMoe)
    model = checkpoint.model_class(config, build)
    resolved = options.with_flat(kv_dtype="float32", page_size=16, max_seq_len_override=config.max_position)
    spec = attention_spec(resolved, config, CPU)
    if reasons := check_layers(spec, model.attention_layers()):
        raise MinisglError("; ".join(reasons))
    load_weights(model, source, progress=False)
    return model.compute_logits(model.forward(ids, torch.arange(len(ids)), DenseAttention()))


def names_of_keys(patch: Patch) -> set[str]:
    """Return the keys of a patch and of objects in it, and their names in messages."""
    inner = (key for value in patch.values() if isinstance(value, Mapping) for key in value)
    return {*patch, *inner, *(ALIASES[key] for key in patch if key in ALIASES)}


def defaults(case: Case) -> dict[str, Any]:
    """Return all keys of transformers' config class, and those beside the ``text_config`` of a multimodal model."""
    text = AutoConfig.for_model(case.model_type, **case.base).to_dict()
    if not case.beside_text:
        return text
    whole = AutoConfig.for_model(**case.beside_text, text_config=text).to_dict()
    return {**whole.pop("text_config"), **whole}


def test_every_registered_architecture_has_a_case() -> None:
    assert sorted({*CASES, "transformers"}) == shipped()


@pytest.mark.parametrize("architecture", CASES)
def test_every_key_is_followed_or_refused_by_name(architecture: str) -> None:
    case, faults = CASES[architecture], {}
    own = defaults(case).keys()
    patches = case.patches(own)
    if unknown := own - patches.keys() - WITHOUT_EFFECT - case.without_effect:
        faults["keys without other values"] = str(sorted(unknown))
    base = base_outcome(architecture)
    assert base.logits is not None, base.reason
    for key, changes in patches.items():
        is_effective = False
        for patch in changes:
            found = Outcome(architecture, case.raw(patch))
            if fault := found.fault(names_of_keys(patch)):
                faults[str(patch)] = fault
            if key in own and not is_effective:
                is_effective = found.reference is None or not same(found.reference, base.reference)
        if key in own and not is_effective:
            faults[key] = "no value changes what transformers computes: add one, or review the key as without effect"
    assert not faults, json.dumps(faults, indent=1)


@pytest.mark.parametrize("architecture", CASES)
def test_keys_without_effect_have_none(architecture: str) -> None:
    case = CASES[architecture]
    config = defaults(case)
    keys = (WITHOUT_EFFECT | case.without_effect) - {"use_cache", "return_dict", "is_encoder_decoder"}
    patch = {key: OTHER[type(config[key])](config[key]) for key in keys if type(config.get(key)) in OTHER}
    patch = {
        key: value for key, value in patch.items() if key not in Outcome(architecture, case.raw({key: value})).reason
    }
    assert len(patch) > 3
    found = Outcome(architecture, case.raw(patch))
    assert found.fault(()) == ""
    assert found.logits is not None, found.reason
    assert same(base_outcome(architecture).reference, found.reference)


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and one.shape == other.shape and torch.equal(one, other)


@pytest.mark.parametrize("architecture", CASES)
def test_random_configs_equal_transformers(architecture: str) -> None:
    """Each config combines supported changes; `nox -s nightly` draws more of them."""
    case = CASES[architecture]
    patches = [patch for changes in case.patches(defaults(case).keys()).values() for patch in changes]
    patches = [patch for patch in patches if not Outcome(architecture, case.raw(patch)).reason]

    @settings(
        max_examples=NUM_DRAWS,
        deadline=None,
        derandomize=NUM_DRAWS == 10,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(st.sampled_from(patches), min_size=2, max_size=5))
    def check(chosen: list[Patch]) -> None:
        merged = {key: value for patch in chosen for key, value in patch.items()}
        assert Outcome(architecture, case.raw(merged)).fault(names_of_keys(merged)) == "", merged

    check()


def test_groups_that_do_not_divide_the_experts_are_named() -> None:
    name = "Glm4MoeForCausalLM"
    outcome = Outcome(name, CASES[name].raw({"n_routed_experts": 5, "n_group": 2, "topk_group": 1}))
    assert outcome.logits is None
    assert "n_routed_experts=5" in outcome.reason
    assert "n_group=2" in outcome.reason


def read(decoder: type[Model], **changes: Any) -> ModelConfig:
    sizes = {**SIZES, "num_hidden_layers": 3, "max_position_embeddings": 128}
    return model_config(decoder.standard_config({**sizes, "architectures": [decoder.__name__], **changes}))


@pytest.mark.parametrize(
    ("decoder", "changes"),
    [
        (Gemma2ForCausalLM, {"use_bidirectional_attention": True}),
        (Gemma3ForCausalLM, {"attn_logit_softcapping": 50.0}),
        (Gemma3ForConditionalGeneration, {"text_config": {**SIZES, "final_logit_softcapping": 30.0}}),
        (Phi3ForCausalLM, {"use_sliding_window": False, "sliding_window": 8}),
        (Phi3ForCausalLM, {"rope_type": "linear", "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ],
)
def test_unsupported_values_are_refused(decoder: type[Model], changes: dict[str, Any]) -> None:
    """They are those of keys that transformers' config class lacks, and of several keys."""
    [reason] = decoder.unsupported(read(decoder, **changes))
    key = next(iter(changes))
    assert ("final_logit_softcapping" if key == "text_config" else key) in reason


@pytest.mark.parametrize("decoder", [Gemma3ForCausalLM, Olmo3ForCausalLM])
def test_rope_parameters_without_layer_types_are_refused(decoder: type[Model]) -> None:
    """transformers ignores such rope_parameters."""
    with pytest.raises(ModelFormatError, match=r"rope_parameters=.* must have one entry per layer type"):
        read(decoder, rope_parameters={"rope_theta": 1e5})


def test_ropes_of_older_gemma_3_checkpoints() -> None:
    keys = {"rope_theta": 2e6, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    config = read(Gemma3ForCausalLM, **keys)
    assert config.sliding_rope
    assert (config.rope.theta, config.rope.kind, config.rope.factor) == (2e6, "linear", 8.0)
    assert (config.sliding_rope.theta, config.sliding_rope.kind) == (2e4, "default")
    assert config.max_position == 128, "max_position_embeddings is the scaled length"


def test_rope_thetas_that_depend_on_the_transformers_version() -> None:
    with pytest.raises(ModelFormatError, match=r"rope_theta=10000\.0 applies to different layers in transformers 4"):
        read(Olmo3ForCausalLM, rope_theta=10000.0)
    assert (
        read(Olmo3ForCausalLM, rope_theta=500000.0, rope_scaling={"rope_type": "yarn", "factor": 4.0}).rope.theta
        == 500000.0
    )


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_names_of_longrope_in_phi_3_checkpoints(name: str) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = read(Phi3ForCausalLM, original_max_position_embeddings=32, rope_scaling={"type": name, **factors})
    assert (config.rope.kind, config.rope.factor, config.rope.original_max_position) == ("longrope", 4.0, 32)
    assert Phi3ForCausalLM.unsupported(config) == []


def test_the_text_config_of_a_multimodal_checkpoint() -> None:
    """Keys outside it apply to the whole model; missing keys have Gemma 3's defaults."""
    raw = {
        "text_config": {"hidden_size": 2560, "eos_token_id": 9},
        "eos_token_id": [1, 106],
        "tie_word_embeddings": False,
    }
    config = model_config(
        Gemma3ForConditionalGeneration.standard_config({**raw, "architectures": ["Gemma3ForConditionalGeneration"]})
    )
    assert (config.hidden_size, config.num_q_heads, config.head_dim, config.vocab_size) == (2560, 8, 256, 262208)
    assert (config.eos_token_ids, config.tie_embeddings) == ((1, 106), False)
    assert config.sliding_windows[:7] == (4096,) * 5 + (None, 4096)
