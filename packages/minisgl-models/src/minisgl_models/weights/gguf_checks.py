"""Checks of a GGUF file's metadata and shapes, which run before memory of these sizes is allocated."""

import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from minisgl_core.config.keys import MAX_CONTEXT, MAX_LAYERS
from minisgl_core.errors import ModelFormatError
from minisgl_core.utils.exceptions import shortened
from minisgl_models.weights.gguf_reader import GgufTensor

MAX_ROPE_FACTORS = 2**12
"""Largest number of RoPE frequencies per head."""
_Check = tuple[Any, str]
"""Type of a value, which msgspec checks without conversions, and its description for errors."""
_Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
_INTEGER: _Check = (int, "an integer")
_FLAG: _Check = (bool, "true or false")
_TEXT: _Check = (str, "a string")
_TEXTS: _Check = (list[str], "an array of strings")
_POSITIVE: _Check = (Annotated[int, Meta(ge=1)], "an integer of at least 1")
_NOT_NEGATIVE: _Check = (Annotated[int, Meta(ge=0)], "an integer of at least 0")
_NUMBER: _Check = (_Finite, "a finite number")
_ABOVE_1: _Check = (Annotated[float, Meta(gt=1, le=sys.float_info.max)], "a number above 1")
_FACTOR: _Check = (Annotated[float, Meta(ge=0, le=MAX_CONTEXT)], f"a number from 0 (no factor) to {MAX_CONTEXT}")

_KEYS: Mapping[str, _Check] = {
    **{f"tokenizer.ggml.{name}_token_id": _INTEGER for name in ("bos", "eos", "eot", "eom", "unknown", "padding")},
    **{f"tokenizer.ggml.add_{name}_token": _FLAG for name in ("bos", "eos")},
    "tokenizer.ggml.add_space_prefix": _FLAG,
    **dict.fromkeys(("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.chat_template"), _TEXT),
    **dict.fromkeys(("tokenizer.ggml.tokens", "tokenizer.ggml.merges"), _TEXTS),
    "tokenizer.ggml.token_type": (list[int], "an array of integers"),
    "tokenizer.ggml.scores": (list[_Finite], "an array of finite numbers"),
}
_COMMON_KEYS: Mapping[str, _Check] = {
    "block_count": (Annotated[int, Meta(ge=1, le=MAX_LAYERS)], f"1 to {MAX_LAYERS} layers"),
    **dict.fromkeys(("embedding_length", "feed_forward_length", "attention.head_count"), _POSITIVE),
    **dict.fromkeys(("attention.head_count_kv", "attention.key_length", "rope.dimension_count"), _POSITIVE),
    "attention.layer_norm_rms_epsilon": (Annotated[float, Meta(ge=0, le=sys.float_info.max)], "a number of at least 0"),
    "context_length": (Annotated[int, Meta(ge=1, le=MAX_CONTEXT)], f"1 to {MAX_CONTEXT} tokens"),
    "rope.freq_base": _ABOVE_1,
    "rope.scaling.type": _TEXT,
    "rope.scaling.original_context_length": _POSITIVE,
    **dict.fromkeys(("rope.scaling.factor", "rope.scale_linear"), _FACTOR),
    **dict.fromkeys([f"rope.scaling.{name}" for name in ("attn_factor", "yarn_beta_fast", "yarn_beta_slow")], _NUMBER),
}
"""Checks of keys that files of every architecture may have. The architecture's name prefixes these keys."""
_OTHER_KEYS: Mapping[str, _Check] = {
    "expert_count": _NOT_NEGATIVE,
    **dict.fromkeys(
        ("expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length"), _POSITIVE
    ),
    **dict.fromkeys(("attention.scale", "embedding_scale", "residual_scale", "logit_scale"), _NUMBER),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), _NUMBER),
    "attention.sliding_window": _NOT_NEGATIVE,
    "attention.sliding_window_pattern": (
        Annotated[int, Meta(ge=1)] | list[bool],
        "an integer of at least 1 or an array of flags",
    ),
    "rope.freq_base_swa": _ABOVE_1,
}
"""Likewise, of keys that some architectures read."""


def check_metadata(path: Path, metadata: Mapping[str, Any]) -> None:
    """Check the type and range of each key that is read.

    Raises:
        ModelFormatError: a key is invalid; the error names it, its value and what is allowed.
    """
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ModelFormatError(f"{path}: general.architecture={_shown(arch)} must be a string")
    checks = {**_KEYS, **{f"{arch}.{name}": check for name, check in {**_COMMON_KEYS, **_OTHER_KEYS}.items()}}
    for key, (kind, allowed) in checks.items():
        if key in metadata:
            try:
                msgspec.convert(metadata[key], kind)
            except msgspec.ValidationError:
                raise ModelFormatError(f"{path}: {key}={_shown(metadata[key])} must be {allowed}") from None


_FIXED_KEYS: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_gating_func": (0, 1),  # softmax, the default
    "expert_weights_scale": (0.0, 1.0),
    "expert_group_count": (0, 1),
    "expert_shared_count": (0, 1),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "rope.scaling.finetuned": (True, False),  # informational, except in Granite files
    "use_parallel_residual": (False,),
    "attention.sliding_window": (0,),
}
"""Keys that are not read, with the values that agree with the architectures. Other values are refused."""
_WITHOUT_EFFECT = ("vocab_size", "tensor_data_layout", "attention.value_length")
"""Keys whose content also follows from the tensors."""


def check_keys(path: Path, arch: str, metadata: Mapping[str, Any], read: Collection[str]) -> None:
    """Refuse keys of the architecture that are not read, unless they are known to have no effect.

    `read` has the keys that were read, without the architecture's name. The common ones are always allowed.

    Raises:
        ModelFormatError: the error names the key.
    """
    for key, value in metadata.items():
        name = key.removeprefix(f"{arch}.")
        if name == key or name in (*_COMMON_KEYS, *_WITHOUT_EFFECT, *read):
            continue
        if arch == "granite" and name == "rope.scaling.finetuned" and value is False:
            raise ModelFormatError(f"{path}: {key}=False is not supported; this Granite model has no rotary embedding")
        allowed = _FIXED_KEYS.get(name, ())
        if value not in allowed:
            only = f", only {' or '.join(map(str, allowed))}" if allowed else ""
            raise ModelFormatError(
                f"{path}: {key}={_shown(value)} is not supported{only}; the engine does not read this key"
            )


def check_shapes(path: Path, config: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
    """Check the dimensions in the metadata against the tensors, whose sizes are limited by the size of the file.

    `config` has the metadata under the names of a ``config.json``, `tensors` has llama.cpp's names.

    Raises:
        ModelFormatError: a tensor is missing or has another shape; the error names both shapes.
    """
    num_layers = config["num_hidden_layers"]
    layers = {name.split(".")[1] for name in tensors if name.startswith("blk.")}
    if len(layers) != num_layers or not layers <= {str(layer) for layer in range(len(layers))}:
        raise ModelFormatError(f"{path}: block_count={num_layers}, but the file has tensors of {len(layers)} blocks")
    matrices = _matrices_of_block(config).items()
    expected = {
        "token_embd": (config.get("vocab_size"), config["hidden_size"]),
        **{f"blk.{layer}.{stem}": shape for layer in range(num_layers) for stem, shape in matrices},
    }
    for stem, shape in expected.items():
        if f"{stem}.weight" not in tensors:
            raise ModelFormatError(f"{path}: tensor {stem}.weight is missing")
        for name, wanted in ((f"{stem}.weight", shape), (f"{stem}.bias", shape[:-1])):
            if name in tensors and tensors[name].shape != wanted:
                raise ModelFormatError(
                    f"{path}: tensor {name} has the shape {tensors[name].shape}, but the metadata imply {wanted}"
                )


def _matrices_of_block(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape [out, in] of each matrix of a block, or [experts, out, in] of a stack, by llama.cpp's stem."""
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    is_phi3 = config["architectures"][0] == "Phi3ForCausalLM"
    shapes: dict[str, tuple[int, ...]] = {"attn_output": (hidden, q)}
    if is_phi3:
        shapes["attn_qkv"] = q + 2 * kv, hidden
    else:
        shapes |= {"attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden)}
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        width = config.get("moe_intermediate_size", intermediate)
        shapes |= dict.fromkeys(("ffn_gate_exps", "ffn_up_exps"), (experts, width, hidden))
        shapes |= {"ffn_gate_inp": (experts, hidden), "ffn_down_exps": (experts, hidden, width)}
    elif is_phi3:
        shapes |= {"ffn_up": (2 * intermediate, hidden), "ffn_down": (hidden, intermediate)}
    else:
        shapes |= dict.fromkeys(("ffn_gate", "ffn_up"), (intermediate, hidden))
        shapes["ffn_down"] = hidden, intermediate
    if shared := config.get("shared_expert_intermediate_size"):
        shapes |= dict.fromkeys(("ffn_gate_shexp", "ffn_up_shexp"), (shared, hidden))
        shapes["ffn_down_shexp"] = hidden, shared
    return shapes


def _shown(value: Any) -> str:
    return shortened(repr(value[:8] if isinstance(value, list) else value), 80)
