"""Malformed configs: for all architectures and keys, the model is built or a typed error names the key."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from config_cases import CASES, WITHOUT_EFFECT
from test_architectures import build
from test_config_keys import defaults, names_of_keys, registry
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from minisgl_core.config.options import EngineConfig
from minisgl_core.contracts.model import Model
from minisgl_core.engine.checkpoint import open_checkpoint
from minisgl_core.errors import MinisglError, ModelFormatError
from minisgl_models.transformers_backend import operation_limit

NONSENSE: tuple[Any, ...] = ("x", ["x"], {"x": 1}, math.nan, math.inf, 10**400)
"""Values that are invalid for every key with an effect."""
ODD: tuple[Any, ...] = (None, True, False, 0, -1, 1.5, "", [], {}, [1], [[]], {"full_attention": 1}, 1e300)
"""Values that are valid for some keys."""
UNKNOWN_INSIDE = {"x"}
"""Unknown key in the RoPE settings, which transformers ignores, too."""
ROPE = {
    "original_max_position_embeddings": 16,
    "rope_theta": 1e4,
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0] * 4,
}
ROPE_KEYS = {
    "yarn": ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("factor", "short_factor", "long_factor", "original_max_position_embeddings", "attention_factor"),
    "linear": ("factor", "rope_theta", "partial_rotary_factor", "rope_type"),
}


def reason(provider: type[Model], raw: Mapping[str, Any]) -> str | None:
    """Return the error message; None if the model is built."""
    try:
        build(provider, raw)
    except MinisglError as error:
        return str(error)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__} escapes: {error}") from error
    return None


def check(provider: type[Model], raw: Mapping[str, Any], keys: set[str], value: Any) -> str:
    """Return a description of the error for a bad value; empty if there is none. Values of `NONSENSE` must be refused."""
    try:
        message = reason(provider, raw)
    except AssertionError as error:
        return str(error)
    if message is None:
        return "is accepted" if any(value is each for each in NONSENSE) and not keys & UNKNOWN_INSIDE else ""
    return "" if any(key in message for key in keys) else f"the key is not named: {message}"


@pytest.mark.parametrize("architecture", CASES)
def test_invalid_values_of_all_keys(architecture: str) -> None:
    case, provider, faults = CASES[architecture], registry().load("models", architecture), {}
    own = defaults(case).keys()
    assert reason(provider, {"architectures": [architecture], **case.raw({})}) is None
    unread = WITHOUT_EFFECT | case.without_effect
    for key, value in product({*own, *case.base} - {"architectures"}, (*NONSENSE, *ODD)):
        strict = None if key in unread else value
        if fault := check(
            provider, {**case.raw({key: value}), "architectures": [architecture]}, names_of_keys({key: value}), strict
        ):
            faults[f"{key}={value!r:.40}"] = fault
    assert not faults, json.dumps(faults, indent=1)


@pytest.mark.parametrize("kind", ROPE_KEYS)
def test_invalid_values_of_rope_settings(kind: str) -> None:
    faults = {}
    for architecture, wrap in (
        ("LlamaForCausalLM", None),
        ("Phi3ForCausalLM", None),
        ("Olmo3ForCausalLM", "full_attention"),
    ):
        provider = registry().load("models", architecture)
        base = {"architectures": [architecture], **CASES[architecture].raw({})}
        for key, value in product(ROPE_KEYS[kind], (*NONSENSE, *ODD)):
            settings = {**ROPE, "rope_type": kind, key: value}
            raw = {**base, "rope_parameters": {wrap: settings} if wrap else settings}
            if fault := check(provider, raw, {key, "rope_type"}, None):
                faults[f"{architecture} {key}={value!r:.40}"] = fault
    assert not faults, json.dumps(faults, indent=1)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["x"], "text_config=['x'] is not an object"),
        ({"hidden_size": "x"}, "hidden_size='x' is not a number"),
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers=1000000000 is not a whole number of at least 1 and at most 1024",
        ),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern=0 is not a whole number of at least 1"),
        ({"query_pre_attn_scalar": -1}, "query_pre_attn_scalar=-1 is not above 0"),
    ],
)
def test_the_text_config_of_a_multimodal_model(value: Any, message: str) -> None:
    provider = registry().load("models", "Gemma3ForConditionalGeneration")
    found = reason(provider, {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": value})
    assert message in str(found)


def written(folder: Path, architecture: str, raw: Mapping[str, Any]) -> EngineConfig:
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **raw}))
    return EngineConfig.from_flat(model=str(folder), platform="cpu", model_impl="auto", dummy_weight=True)


@pytest.mark.parametrize(
    ("architecture", "raw"),
    [(architecture, case.raw({})) for architecture, case in CASES.items()]
    + [
        ("BloomForCausalLM", {"model_type": "bloom", "n_layer": 2}),
        ("StableLmForCausalLM", {"model_type": "stablelm"}),
        ("Gemma3ForConditionalGeneration", {"text_config": {"num_hidden_layers": 2}}),
        ("MllamaForConditionalGeneration", {"model_type": "mllama", "text_config": {"num_hidden_layers": 2}}),
    ],
)
def test_billions_of_layers_are_refused_before_allocation(
    architecture: str, raw: dict[str, Any], tmp_path: Path
) -> None:
    key = next((key for key in ("n_layer", "text_config") if key in raw), "num_hidden_layers")
    many = {**raw, key: {"num_hidden_layers": 3 * 10**9} if key == "text_config" else 3 * 10**9}
    with pytest.raises(ModelFormatError, match=r"(num_hidden_layers|n_layer)=3000000000 is not at most 1024"):
        open_checkpoint(written(tmp_path, architecture, many), registry())


BY_TRANSFORMERS = {
    "bloom": "BloomForCausalLM",
    "falcon": "FalconForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "smollm3": "SmolLM3ForCausalLM",
    "stablelm": "StableLmForCausalLM",
}


@pytest.mark.parametrize("model_type", BY_TRANSFORMERS)
def test_invalid_values_with_the_transformers_backend(model_type: str) -> None:
    """transformers' own validation names keys of wrong types. Sizes are checked before a model is built."""
    kind, provider, faults = CONFIG_MAPPING[model_type], registry().load("models", "transformers"), {}
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes = {kind.attribute_map.get(key, key): value for key, value in sizes.items()}
    base = {"architectures": [BY_TRANSFORMERS[model_type]], "model_type": model_type, **sizes}
    others = ("max_position_embeddings", "num_key_value_heads", "rope_parameters", "is_encoder_decoder")
    for key, value in product((*sizes, *others, "architectures", "model_type"), (*NONSENSE, 0, -1, [], {})):
        bad = {**base, kind.attribute_map.get(key, key): value}
        fault = check(provider, bad, {key}, value if key in sizes else None)
        if fault and (key in sizes or "escapes" in fault):
            faults[f"{key}={value!r:.40}"] = fault
    assert not faults, json.dumps(faults, indent=1)


@pytest.mark.parametrize(
    ("model_type", "key", "message"),
    [
        ("hrm_text", "L_cycles", "over 4096 operations"),
        ("xlstm", "num_blocks", "over 4096 operations"),
        ("mixtral", "num_local_experts", "100000 experts, over 65536"),
    ],
)
def test_models_that_transformers_would_build_or_run_for_hours(
    model_type: str, key: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operation_limit, "_MAX_OPERATIONS", 4096)
    layers = {"num_hidden_layers": 1} if model_type == "mixtral" else {}
    raw = {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]], "model_type": model_type, **layers}
    with pytest.raises(ModelFormatError, match=message):
        registry().load("models", "transformers").standard_config({**raw, key: 100_000})
