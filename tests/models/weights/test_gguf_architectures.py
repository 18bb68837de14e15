"""Tiny files of each GGUF architecture have the config and tensors of the same model in safetensors."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from config_cases import CASES
from safetensors.numpy import load_file
from test_gguf import llama_cpp_permute
from transformers import AutoConfig

from minisgl_core.config.hf import model_config
from minisgl_core.contracts.model import Model
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.errors import ModelFormatError
from minisgl_core.plugins.registry import Registry
from minisgl_core.testing.references import random_reference
from minisgl_models.weights.gguf_architectures import ARCHITECTURES
from minisgl_models.weights.gguf_file import GgufWeights

Tensors = dict[str, np.ndarray]
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 1.0, 1.0], "long_factor": [1.0, 2.0, 3.0, 4.0]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False}


@dataclass(frozen=True)
class Form:
    """Metadata and tensors that llama.cpp's converter writes for an architecture.

    Attributes:
        kind: llama.cpp's name of the architecture.
        name: Hugging Face's class.
        changes: of the tiny config of `config_cases`.
        keys: metadata besides the common ones.
        extra: tensors that the safetensors form has in its config.
        rope_theta: base of the frequencies.
    """

    kind: str
    name: str
    changes: Mapping[str, Any]
    keys: Mapping[str, Any]
    extra: Mapping[str, list[float]]
    rope_theta: float = 10000.0


def gguf_form(
    kind: str, name: str, changes: Mapping[str, Any] = {}, extra: Any = (), theta: float = 1e4, **keys: Any
) -> Form:
    return Form(kind, name, changes, {key.replace("__", "."): value for key, value in keys.items()}, dict(extra), theta)


FORMS = {
    "qwen3": gguf_form("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": gguf_form(
        "qwen3moe",
        "Qwen3MoeForCausalLM",
        {"norm_topk_prob": True},
        expert_count=6,
        expert_used_count=2,
        expert_feed_forward_length=16,
    ),
    "mixtral": gguf_form("llama", "MixtralForCausalLM", {"rope_theta": 1e4}, expert_count=4, expert_used_count=2),
    "qwen2moe": gguf_form(
        "qwen2moe",
        "Qwen2MoeForCausalLM",
        expert_count=6,
        expert_used_count=2,
        expert_feed_forward_length=16,
        expert_shared_feed_forward_length=20,
    ),
    "gemma2": gguf_form(
        "gemma2",
        "Gemma2ForCausalLM",
        {"query_pre_attn_scalar": 12, "sliding_window": 7},
        attention__sliding_window=7,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    ),
    "gemma3": gguf_form(
        "gemma3",
        "Gemma3ForCausalLM",
        {
            "query_pre_attn_scalar": 12,
            "sliding_window": 7,
            "sliding_window_pattern": 6,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        theta=1e6,
        attention__sliding_window=7,
        rope__scaling__type="linear",
        rope__scaling__factor=8.0,
    ),
    "phi3": gguf_form(
        "phi3",
        "Phi3ForCausalLM",
        {"original_max_position_embeddings": 16, "rope_scaling": LONGROPE, "sliding_window": 7},
        {"rope_factors_long.weight": LONGROPE["long_factor"], "rope_factors_short.weight": LONGROPE["short_factor"]},
        attention__sliding_window=7,
        rope__scaling__original_context_length=16,
        rope__dimension_count=8,
    ),
    "granite": gguf_form(
        "granite",
        "GraniteForCausalLM",
        {"attention_multiplier": 0.25, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0},
        attention__scale=0.25,
        embedding_scale=3.0,
        residual_scale=0.5,
        logit_scale=4.0,
    ),
    "olmo2": gguf_form("olmo2", "Olmo2ForCausalLM"),
    "gpt-oss": gguf_form(
        "gpt-oss",
        "GptOssForCausalLM",
        {"rope_parameters": {**YARN, "rope_theta": 1e4}},
        expert_count=4,
        expert_used_count=2,
        expert_feed_forward_length=48,
        attention__sliding_window=7,
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=16,
    ),
}


def converted(kind: str, config: Any, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    """Yield Hugging Face's names with the values and shapes that llama.cpp's converter writes."""
    stacks: dict[str, list[np.ndarray]] = {}
    for name, values in tensors.items():
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        if kind in ("llama", "granite") and (".q_proj." in name or ".k_proj." in name):
            is_query = ".q_proj." in name
            heads = config.num_attention_heads if is_query else config.num_key_value_heads
            values = llama_cpp_permute(values, heads)
        if kind == "gpt-oss" and ".experts." in name:
            stem = name.removesuffix("_bias")
            suffix = ".bias" if stem != name else ".weight"
            values = values if suffix == ".bias" else values.transpose(0, 2, 1)
            if "gate_up" not in stem:
                yield stem + suffix, values
                continue
            for offset, part in enumerate(("gate_proj", "up_proj")):
                yield stem.replace("gate_up_proj", part) + suffix, values[:, offset::2]
        elif ".experts." in name:
            prefix, rest = name.split(".experts.")
            stacks.setdefault(f"{prefix}.experts.{rest.split('.', 1)[1]}", []).append(values)
        elif name.endswith(".sinks"):
            yield f"{name}.weight", values
        else:
            yield name, values
    yield from ((name, np.stack(each)) for name, each in stacks.items())


def write(path: Path, each: Form, config: Any, tensors: Tensors, **keys: Any) -> Path:
    writer = gguf.GGUFWriter(path, each.kind)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(each.rope_theta)
    if "head_dim" in CASES[each.name].base:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    for key, value in {**each.keys, **keys}.items():
        writer.add_key_value(f"{each.kind}.{key}", value, gguf.GGUFValueType.get_type(value))
    for name, values in each.extra.items():
        writer.add_tensor(name, np.array(values, np.float32))
    kinds = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[each.kind], config.num_hidden_layers)
    for name, values in converted(each.kind, config, tensors):
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        writer.add_tensor(target, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@lru_cache
def make_both_forms(name: str) -> tuple[Path, dict[str, Any], Tensors, type[Model]]:
    """Return a GGUF file, and the ``config.json``, the tensors and the class of the same model."""
    each, folder = FORMS[name], Path(mkdtemp(prefix=f"gguf-{name}-"))
    case = CASES[each.name]
    raw = {"architectures": [each.name], "model_type": case.model_type, **case.base, **each.changes}
    config = AutoConfig.for_model(**raw)
    random_reference(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    provider: type[Model] = Registry.from_environment().load("models", each.name)
    return write(folder / "m.gguf", each, config, tensors), raw, tensors, provider


def standardised(provider: type[Model], raw: Mapping[str, Any]) -> ModelConfig:
    config = model_config(provider.standard_config(raw))
    assert provider.unsupported(config) == []
    return config


@pytest.mark.parametrize("name", FORMS)
def test_config_equals_that_of_safetensors(name: str) -> None:
    path, raw, _, provider = make_both_forms(name)
    found, expected = standardised(provider, GgufWeights(path).config), standardised(provider, raw)
    for each in fields(ModelConfig):
        if each.name not in ("raw", "dtype", "bos_token_id", "eos_token_ids"):
            mine, other = getattr(found, each.name), getattr(expected, each.name)
            assert mine == (pytest.approx(other, rel=1e-6) if isinstance(other, float) else other), each.name
    other_keys = set(FORMS[name].changes) - {"rope_parameters", "rope_scaling", "sliding_window_pattern", "rope_theta"}
    for key in other_keys:
        assert found.raw[key] == expected.raw[key], key


@pytest.mark.parametrize("name", FORMS)
def test_tensors_equal_those_of_safetensors(name: str) -> None:
    path, _, tensors, provider = make_both_forms(name)
    source = GgufWeights(path)
    found = dict(source.tensors(standardised(provider, source.config)))
    assert found.keys() == tensors.keys()
    for key, expected in tensors.items():
        whole = torch.from_numpy(expected)
        assert tuple(found[key].shape) == expected.shape, key
        assert torch.allclose(found[key][()].float(), whole, rtol=1e-6, atol=1e-6), key
        part = tuple(slice(size // 2, size) for size in expected.shape)
        assert torch.allclose(found[key][part].float(), whole[part], rtol=1e-6, atol=1e-6), f"a part of {key}"


def test_every_architecture_has_a_file() -> None:
    tested_elsewhere = {"llama", "qwen2"}  # test_gguf.py
    assert {each.kind for each in FORMS.values()} | tested_elsewhere == set(ARCHITECTURES)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("qwen3", "attention.clamp_kqv", 8.0),
        ("qwen3", "expert_weights_scale", 2.5),
        ("olmo2", "attention.sliding_window", 4096),
        ("granite", "rope.scaling.finetuned", False),
        ("qwen3", "rope.scaling.yarn_log_multiplier", 0.5),
        ("qwen3", "attention.causal", False),
    ],
)
def test_unsupported_keys_are_refused(name: str, key: str, value: Any, tmp_path: Path) -> None:
    each = FORMS[name]
    raw = {**CASES[each.name].base, **each.changes}
    path = write(
        tmp_path / "m.gguf", each, AutoConfig.for_model(CASES[each.name].model_type, **raw), {}, **{key: value}
    )
    with pytest.raises(
        ModelFormatError, match=rf"{each.kind}\.{key}={json.dumps(value).capitalize()} is not supported"
    ):
        _ = GgufWeights(path).config


def test_a_gate_bias_without_the_up_bias_is_refused(tmp_path: Path) -> None:
    each = FORMS["gpt-oss"]
    _, raw, tensors, provider = make_both_forms("gpt-oss")
    config = AutoConfig.for_model(**raw)
    lacking = {name: values for name, values in tensors.items() if not name.endswith("gate_up_proj_bias")}
    shape = (config.num_local_experts, config.intermediate_size)
    gate: dict[str, Any] = {f"blk.{i}.ffn_gate_exps.bias": np.zeros(shape) for i in range(config.num_hidden_layers)}
    weights = GgufWeights(write(tmp_path / "m.gguf", replace(each, extra={**each.extra, **gate}), config, lacking))
    with pytest.raises(ModelFormatError, match=r"m\.gguf: .*blk\.0\.ffn_up_exps\.bias"):
        list(weights.tensors(standardised(provider, weights.config)))


@pytest.mark.parametrize(("columns", "expected"), [((), (1, 32)), ((1,), (1, 32)), ((2,), (2, 32))])
def test_the_shared_expert_gate_becomes_a_matrix(
    columns: tuple[int, ...], expected: tuple[int, ...], tmp_path: Path
) -> None:
    """llama.cpp stores a vector. A matrix keeps its shape, so that loading refuses several rows."""
    each = FORMS["qwen2moe"]
    _, raw, tensors, provider = make_both_forms("qwen2moe")
    name = "model.layers.0.mlp.shared_expert_gate.weight"
    values = np.arange(32 * (columns or (1,))[0], dtype=np.float32).reshape(*columns, 32)
    path = write(tmp_path / "m.gguf", each, AutoConfig.for_model(**raw), {**tensors, name: values})
    source = GgufWeights(path)
    gate = dict(source.tensors(standardised(provider, source.config)))[name]
    assert tuple(gate.shape) == expected
    assert torch.equal(gate[slice(0, 1), slice(3, 6)], torch.tensor([[3.0, 4.0, 5.0]]))


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt-oss"])
def test_huge_numbers_of_layers_are_refused_before_allocation(name: str, tmp_path: Path) -> None:
    data = bytearray(make_both_forms(name)[0].read_bytes())
    place = data.index(b".block_count") + len(".block_count") + 4  # after the value's type
    data[place : place + 4] = struct.pack("<I", 2**31)
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFormatError, match=rf"{name}\.block_count=2147483648 must be 1 to"):
        GgufWeights(path)


def test_huge_shared_experts_without_tensors_are_refused_before_allocation(tmp_path: Path) -> None:
    each = FORMS["qwen2moe"]
    _, raw, tensors, _ = make_both_forms("qwen2moe")
    lacking = {name: values for name, values in tensors.items() if ".shared_expert." not in name}
    huge = {"expert_shared_feed_forward_length": 2**31 - 1}
    path = write(tmp_path / "m.gguf", each, AutoConfig.for_model(**raw), lacking, **huge)
    with pytest.raises(ModelFormatError, match=r"m\.gguf: tensor blk\.0\.ffn_\w+_shexp\.weight is missing"):
        _ = GgufWeights(path).config


@pytest.mark.parametrize(
    ("name", "size", "default"),
    [("expert", 24, 24), ("expert", 20, 24), ("expert_shared", 48, 48), ("expert_shared", 20, 48)],
)
def test_experts_without_keys_have_the_sizes_of_llama_cpp(name: str, size: int, default: int, tmp_path: Path) -> None:
    """Two of six experts are used, and feed_forward_length is 48. So experts have 24 outputs, and the shared one has 48."""
    each = FORMS["qwen2moe"]
    key = {"expert": "moe_intermediate_size", "expert_shared": "shared_expert_intermediate_size"}[name]
    _, raw, _, provider = make_both_forms("qwen2moe")
    config = AutoConfig.for_model(**{**raw, "intermediate_size": 48, key: size})
    random_reference(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    sizes = {
        "expert_feed_forward_length": 16,
        "expert_shared_feed_forward_length": 20,
        f"{name}_feed_forward_length": size,
    }
    path = write(tmp_path / "m.gguf", each, config, tensors, **sizes)
    unused = f"qwen2moe.{name}_feed_forward_length".encode()
    path.write_bytes(path.read_bytes().replace(unused, unused.replace(b"qwen2moe", b"unusedkv")))
    if size == default:
        assert standardised(provider, GgufWeights(path).config).raw[key] == default
    else:
        with pytest.raises(ModelFormatError, match=f"but the metadata imply .*{default}"):
            _ = GgufWeights(path).config


def test_heads_without_keys_have_the_defaults_of_llama_cpp(tmp_path: Path) -> None:
    """Gemma's own defaults are other ones: 4 KV heads and heads of 256."""
    each, case = FORMS["gemma2"], CASES["Gemma2ForCausalLM"]
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": case.base["hidden_size"] // 8}
    config = AutoConfig.for_model(case.model_type, **{**case.base, **each.changes, **heads})
    tensors = {name: value.numpy() for name, value in random_reference(config).state_dict().items()}
    del tensors["lm_head.weight"]
    path = write(tmp_path / "m.gguf", each, config, tensors)
    data = path.read_bytes()
    for key in (b"attention.head_count_kv", b"attention.key_length"):
        data = data.replace(b"gemma2." + key, b"unused." + key)
    path.write_bytes(data)
    _, _, _, provider = make_both_forms("gemma2")
    found = standardised(provider, GgufWeights(path).config)
    assert (found.num_kv_heads, found.head_dim) == (8, heads["head_dim"])
    assert found.raw["query_pre_attn_scalar"] == heads["head_dim"]


@pytest.mark.parametrize("missing", ["rope_factors_long.weight", "rope_factors_short.weight"])
def test_longrope_with_one_list_of_factors_is_refused(missing: str, tmp_path: Path) -> None:
    each = FORMS["phi3"]
    _, raw, tensors, _ = make_both_forms("phi3")
    extra = {name: values for name, values in each.extra.items() if name != missing}
    path = write(tmp_path / "m.gguf", replace(each, extra=extra), AutoConfig.for_model(**raw), tensors)
    with pytest.raises(
        ModelFormatError, match=r"m\.gguf: only one of rope_factors_long\.weight and rope_factors_short"
    ):
        _ = GgufWeights(path).config
