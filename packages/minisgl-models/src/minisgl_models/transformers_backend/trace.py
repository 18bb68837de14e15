"""The attention layers of a transformers model, traced in one forward on the meta device.

Heads, scales, windows, soft caps and sinks are read from the arguments of the model's attention calls. The meaning of config
keys differs between architectures. Config keys only serve to refuse a model and to bound its size. A model that reads
values of tensors on the host, as CUDA graphs forbid, fails here.
"""

import json
import math
from collections.abc import Mapping, Set
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from threading import Lock
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from minisgl_core.config.hf import architecture_of
from minisgl_core.config.keys import MAX_CONTEXT, MAX_EXPERTS, MAX_INT, MAX_LAYERS, Keys, check_layer_counts
from minisgl_core.errors import ModelFormatError
from minisgl_core.utils.exceptions import one_line, one_line_with_type
from minisgl_models.transformers_backend import falcon
from minisgl_models.transformers_backend.attention_function import TRACE, check_keywords, set_handler, window_of
from minisgl_models.transformers_backend.identity_backbone import detach_backbone
from minisgl_models.transformers_backend.operation_limit import OperationLimit

_NUM_TOKENS = 5
_FACTORS = ("partial_rotary_factor", "rope_theta")
"""Keys whose numbers may be integers in a config, though they are used as floats."""
_SIZES = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "head_dim"), MAX_INT),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), MAX_INT),
    "num_hidden_layers": MAX_LAYERS,
    "max_position_embeddings": MAX_CONTEXT,
}
"""Largest sizes, by the names that transformers' config classes share; ``attribute_map`` has a class's own names."""
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
"""Floats that transformers 5 writes as ``{"__float__": "Infinity"}``."""
BUILD_LOCK = Lock()
"""Held while transformers builds or initializes a model, because that changes torch's default dtype for all threads."""
_STATE = "it keeps a state per request besides K and V (recurrent or convolution layers)"
_MAX_POSITIONS = 1 << 20
"""Longest sequence that masks are compared for."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's call of the attention function, in a model that is not sharded.

    Attributes:
        module: name of the module that calls.
        num_q_heads: Hq.
        num_kv_heads: Hkv.
        head_dim: D of q and k.
        value_head_dim: D of v.
        scale: factor on the scores.
        sliding_window: in tokens, by the mask; None for all.
        keyword_window: the keyword argument ``sliding_window``.
        soft_cap: soft cap of the scores; None for none.
        sinks: name of the parameter with the attention sinks; None without.
    """

    module: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    scale: float
    sliding_window: int | None
    keyword_window: int | None
    soft_cap: float | None
    sinks: str | None


@dataclass(frozen=True, slots=True)
class Traced:
    """A config of transformers and the calls of its model.

    Attributes:
        config: transformers' config.
        calls: one per decoder layer, in order.
    """

    config: Any
    calls: tuple[AttentionCall, ...]


def transformers_config(raw: Mapping[str, Any]) -> Any:
    """Return transformers' own config of a ``config.json``.

    Raises:
        ModelFormatError: transformers has no causal LM of that name; code of the checkpoint is never run.
    """
    model_type, architecture = Keys(raw).text("model_type"), architecture_of(raw)
    if not model_type:
        raise ModelFormatError(
            "config: model_type is missing; --model-impl transformers needs a Hugging Face folder, not a GGUF file"
        )
    if architecture not in _architectures(model_type):
        raise ModelFormatError(
            f"transformers has no causal LM {architecture} of model_type {model_type!r}; --model-impl transformers runs causal"
            " LMs of the installed transformers, and no code of a checkpoint"
        )
    plain = {key: value for key, value in raw.items() if key not in ("quantization_config", "auto_map")}
    kind = CONFIG_MAPPING[model_type]
    _check_values(plain, kind)
    try:
        return kind.from_dict(plain)
    except Exception as error:
        raise ModelFormatError(f"config: transformers refuses it: {one_line(error):.300}") from error


def _architectures(model_type: str) -> Set[str]:
    """Return the names of the causal LM of a model type: that of its class, and that of its config.

    InternLM3's checkpoints are of InternLM3ForCausalLM, for which transformers has InternLM3Config and LlamaForCausalLM.
    """
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if not known:
        return frozenset()
    config = CONFIG_MAPPING[model_type].__name__.removesuffix("Config")
    return {*((known,) if isinstance(known, str) else known), f"{config}ForCausalLM"}


def _check_values(raw: Mapping[str, Any], kind: Any) -> None:
    """Refuse values that transformers accepts but cannot build a model of, and models of several modalities.

    Raises:
        ModelFormatError: names the key.
    """
    if nested := sorted(kind.sub_configs):
        raise ModelFormatError(
            f"--model-impl transformers runs models with one flat config; that of {raw['model_type']} has {', '.join(nested)}"
        )
    check_layer_counts(raw)
    keys = Keys(raw)
    for name, maximum in _SIZES.items():
        for each in {name, kind.attribute_map.get(name, name)} & raw.keys():
            keys.whole(each, 1, 1, maximum)
    for key, value in raw.items():
        if key in _FACTORS or isinstance(value, float):
            keys.number(key, 1.0)


def build_on_meta(config: PreTrainedConfig, dtype: torch.dtype, attention: str) -> Any:
    """Return the causal LM of a config without memory for its weights, in eval mode.

    Parameters that do not fix their dtype have `dtype`. `attention` is the name of a registered attention function.

    Raises:
        ModelFormatError: transformers cannot build it.
    """
    falcon.register()
    try:
        with BUILD_LOCK, OperationLimit(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                deepcopy(config), dtype=dtype, attn_implementation=attention
            ).eval()
    except ModelFormatError:
        raise
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (attention,):  # a table of attention classes
            raise ModelFormatError(
                f"--model-impl transformers cannot run {config.model_type}: its attention does not use transformers'"
                " AttentionInterface"
            ) from error
        cause = one_line_with_type(error)
        raise ModelFormatError(f"transformers cannot build the model: {cause:.300}") from error
    # With a padding token, a forward without a mask looks for padding among the tokens, on the host.
    vars(model.config)["pad_token_id"] = None  # some configs refuse to set it to None
    return model


def trace(raw: Mapping[str, Any]) -> Traced:
    """Return the config and the attention calls of a ``config.json``.

    Raises:
        ModelFormatError: the model cannot run with paged attention, with the reason.
    """
    return _trace(json.dumps(dict(raw), sort_keys=True, default=str))


@lru_cache(maxsize=8)
def _trace(raw: str) -> Traced:
    config = transformers_config(
        json.loads(raw, object_hook=lambda each: _FLOATS.get(str(each.get("__float__")), each))
    )
    model = build_on_meta(config, torch.bfloat16, TRACE)  # kernels of experts take no float32
    name = type(model).__name__
    try:
        _check_kind(model)
        calls = _calls(model)
        layers = config.num_hidden_layers
        if len(calls) != layers:
            called = f"its {layers} layers call transformers' AttentionInterface {len(calls)} times, not once each"
            raise ModelFormatError(_STATE if _may_have_state(model) else called)
        if getattr(config, "max_position_embeddings", None) is None:
            raise ModelFormatError("its config has no max_position_embeddings, which bounds the context")
        if len({call.module for call in calls}) < len(calls):
            raise ModelFormatError("a module attends several times per step")
        for call in calls:  # attention over no tokens: transformers' own implementations differ
            if call.sliding_window is not None and call.sliding_window < 1:
                raise ModelFormatError(f"{call.module} has a sliding window of {call.sliding_window} tokens, below 1")
    except ModelFormatError as error:
        raise ModelFormatError(f"--model-impl transformers cannot run {name}: {error}") from error
    return Traced(config, calls)


def _check_kind(model: Any) -> None:
    config = model.config
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ModelFormatError("it has cross-attention")
    if getattr(config, "is_causal", True) is False:
        raise ModelFormatError("it is not causal (is_causal in the config)")
    if shared := getattr(config, "num_kv_shared_layers", 0):
        raise ModelFormatError(
            f"its last layers reuse K and V of earlier ones (num_kv_shared_layers={shared} in the config)"
        )
    # The trace is shorter than what such a layer compresses, and cannot show it.
    if compressed := sorted(each for each in getattr(config, "layer_types", None) or () if "compressed" in each):
        raise ModelFormatError(f"its layers attend to compressed tokens ({compressed[0]} in layer_types)")
    if any(isinstance(each, nn.Conv1d) for each in model.modules()):
        raise ModelFormatError(_STATE)
    # Without convolutions, tensors of three dimensions are those of experts.
    stacks = [
        [each.shape[0] for each in module.parameters(recurse=False) if each.ndim == 3] for module in model.modules()
    ]
    if (num_experts := sum(max(each, default=0) for each in stacks)) > MAX_EXPERTS:
        raise ModelFormatError(f"its layers together have {num_experts} experts, over {MAX_EXPERTS}")
    if getattr(config, "alibi", False):
        raise ModelFormatError("it has ALiBi biases (alibi in the config), which paged attention does not support")


def _may_have_state(model: Any) -> bool:
    """Return True if models of this class have a state; a few have attention layers only, such as Granite 4 Micro."""
    layer_types = getattr(model.config, "layer_types", None) or ()
    return bool(getattr(model, "_is_stateful", False)) or "linear_attention" in layer_types


def _calls(model: Any) -> tuple[AttentionCall, ...]:
    names = {module: name for name, module in model.named_modules()}
    parameters = {id(each): name for name, each in model.named_parameters()}
    longest = min(getattr(model.config, "max_position_embeddings", None) or _MAX_POSITIONS, _MAX_POSITIONS)
    windows: dict[torch.Tensor | None, int | None] = {None: None}  # by mask: layers share few masks
    calls: list[AttentionCall] = []

    def record(
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        keywords: dict[str, Any],
    ) -> torch.Tensor:
        check_keywords(module, keywords)
        call = attention_call(names[module], q, k, v, keywords)
        declared = None if call.keyword_window is None or call.keyword_window >= longest else call.keyword_window
        if mask is not None and mask not in windows:
            windows[mask] = window_of(mask, longest)
        window = declared if mask is None else windows[mask]
        if declared not in (None, window):
            raise ModelFormatError(f"{names[module]} has sliding_window={declared}, and its mask {window or 'none'}")
        sinks = keywords.get("s_aux")
        if sinks is not None and id(sinks) not in parameters:
            raise ModelFormatError(f"{names[module]} has attention sinks (s_aux) that are no parameter")
        calls.append(replace(call, sliding_window=window, sinks=None if sinks is None else parameters[id(sinks)]))
        return q.new_empty((1, q.shape[2], q.shape[1], v.shape[3]))

    set_handler(model, record)
    may_have_state = _may_have_state(model)
    ids = torch.zeros((1, _NUM_TOKENS), dtype=torch.int64, device="meta")
    mask = torch.ones_like(ids)
    try:
        with torch.inference_mode(), OperationLimit():
            hidden_states = detach_backbone(model)(
                input_ids=ids,
                # In a mask [1, T], transformers looks for padding on the host if it has code for layers with a state.
                attention_mask=mask[None] if may_have_state else mask,
                position_ids=torch.arange(_NUM_TOKENS, device="meta")[None],
                use_cache=False,
            )[0]
            model(inputs_embeds=hidden_states, use_cache=False)
    except ModelFormatError:
        raise
    except Exception as error:
        if may_have_state:
            raise ModelFormatError(_STATE) from error
        cause = one_line_with_type(error)
        raise ModelFormatError(
            "a forward on the meta device fails, as it does if the model reads tensors on the CPU (RoPE that depends on the"
            " longest sequence, experts with as many rows as the router selects) or needs a KV cache of transformers:"
            f" {cause:.300}"
        ) from error
    return tuple(calls)


def attention_call(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keywords: dict[str, Any]
) -> AttentionCall:
    """Return a call of the attention function; `AttentionCall.sliding_window` and `AttentionCall.sinks` are left None."""
    scale, cap = keywords.get("scaling"), keywords.get("softcap")
    if isinstance(scale, torch.Tensor) or isinstance(cap, torch.Tensor):
        raise ModelFormatError(f"{name} scales its scores by a tensor")
    num_q_heads, num_kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[3]
    scale = float(head_dim**-0.5 if scale is None else scale)
    window = keywords.get("sliding_window")
    return AttentionCall(
        name, num_q_heads, num_kv_heads, head_dim, v.shape[3], scale, None, window, float(cap) if cap else None, None
    )
