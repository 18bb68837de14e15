"""Architectures of GGUF files: the names of their tensors, and their metadata under the names of a ``config.json``.

llama.cpp's converter (``conversion/`` in its repository) writes the metadata, and its ``src/models`` define the defaults.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Lookup = Callable[..., Any]
"""Looks up a key of the architecture: its name without the prefix, and a default. A key without a default is required."""

_DENSE: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NORMS_AROUND = {**_NORMS_AFTER, "ffn_norm": "pre_feedforward_layernorm"}
_GPT_OSS = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_up_proj",
    "ffn_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture of GGUF files.

    Attributes:
        name: Hugging Face's class.
        names: Hugging Face's module of each tensor, by llama.cpp's name; ``{}`` is the index of an expert.
        is_permuted: query and key rows are permuted within each head.
        norm_offset: number that llama.cpp's converter adds to the weights of norms.
        config: function of `Lookup` and the common keys of the config that returns the other keys of the config.
    """

    name: str
    names: Mapping[str, str]
    is_permuted: bool = False
    norm_offset: float = 0.0
    config: Callable[[Lookup, Mapping[str, Any]], dict[str, Any]] = field(default=lambda get, config: {})


def _qwen3_moe(get: Lookup, config: Mapping[str, Any]) -> dict[str, Any]:
    num_used = get("expert_used_count")
    return {
        "num_experts": get("expert_count"),
        "num_experts_per_tok": num_used,
        # Without the key, experts have this size in llama.cpp, too.
        "moe_intermediate_size": get("expert_feed_forward_length", get("feed_forward_length") // num_used),
        "norm_topk_prob": True,
    }


def _qwen2_moe(get: Lookup, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_qwen3_moe(get, config),
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": get("expert_shared_feed_forward_length", get("feed_forward_length")),
        "qkv_bias": config["attention_bias"],
    }


def _mixtral(get: Lookup, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"num_local_experts": get("expert_count"), "num_experts_per_tok": get("expert_used_count")}


def _gpt_oss(get: Lookup, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_mixtral(get, config),
        "intermediate_size": get("expert_feed_forward_length"),
        "sliding_window": get("attention.sliding_window"),
        "layer_types": _layer_types(get, config, 2),
        "rope_parameters": {**config["rope_parameters"], "truncate": False},
    }


def _gemma(get: Lookup, config: Mapping[str, Any], num_layers_of_27b: int) -> dict[str, Any]:
    """Return Gemma's keys. Its 27B models scale scores by the hidden size per head, for which there is no key."""
    is_27b = config["num_hidden_layers"] == num_layers_of_27b
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return {
        "query_pre_attn_scalar": scalar,
        "sliding_window": get("attention.sliding_window", 4096),
        "final_logit_softcapping": get("final_logit_softcapping", None),
    }


def _gemma2(get: Lookup, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_gemma(get, config, 46),
        "attn_logit_softcapping": get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": get("final_logit_softcapping", 30.0),
        "layer_types": _layer_types(get, config, 2),
    }


def _gemma3(get: Lookup, config: Mapping[str, Any]) -> dict[str, Any]:
    has_windows = get("attention.sliding_window", None)
    kinds = _layer_types(get, config, 6) if has_windows else ["full_attention"] * config["num_hidden_layers"]
    local = {"rope_type": "default", "rope_theta": get("rope.freq_base_swa", 10000.0)}
    rope = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    return {**_gemma(get, config, 62), "layer_types": kinds, "rope_parameters": rope}


def _phi3(get: Lookup, config: Mapping[str, Any]) -> dict[str, Any]:
    original = get("rope.scaling.original_context_length", None)
    keys = {"sliding_window": get("attention.sliding_window", None) or None}
    return keys if original is None else {**keys, "original_max_position_embeddings": original}


def _granite(get: Lookup, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return Granite's factors. As in llama.cpp, 0 stands for a missing factor."""
    return {
        "attention_multiplier": get("attention.scale", 0.0) or config["head_dim"] ** -0.5,
        "embedding_multiplier": get("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": get("residual_scale", 0.0) or 1.0,
        "logits_scaling": get("logit_scale", 0.0) or 1.0,
    }


def _layer_types(get: Lookup, config: Mapping[str, Any], period: int) -> list[str]:
    """Return the type of each layer; the file has a period, of which the last layer has no window, or a flag per layer."""
    pattern = get("attention.sliding_window_pattern", period)
    has_window = (
        pattern if isinstance(pattern, list) else [(i + 1) % pattern != 0 for i in range(config["num_hidden_layers"])]
    )
    return ["sliding_attention" if each else "full_attention" for each in has_window]


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", _DENSE, is_permuted=True),
    "qwen2": Architecture("Qwen2ForCausalLM", _DENSE),
    "qwen3": Architecture("Qwen3ForCausalLM", _DENSE),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", {**_DENSE, **_EXPERTS}, config=_qwen3_moe),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", {**_DENSE, **_EXPERTS, **_SHARED_EXPERT}, config=_qwen2_moe),
    "gemma2": Architecture("Gemma2ForCausalLM", {**_DENSE, **_NORMS_AROUND}, norm_offset=1.0, config=_gemma2),
    "gemma3": Architecture("Gemma3ForCausalLM", {**_DENSE, **_NORMS_AROUND}, norm_offset=1.0, config=_gemma3),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        {**_DENSE, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        config=_phi3,
    ),
    "granite": Architecture("GraniteForCausalLM", _DENSE, is_permuted=True, config=_granite),
    "olmo2": Architecture("Olmo2ForCausalLM", {**_DENSE, **_NORMS_AFTER}),
    "gpt-oss": Architecture("GptOssForCausalLM", {**_DENSE, **_GPT_OSS}, config=_gpt_oss),
}
"""Architectures by the value of ``general.architecture``."""

MIXTRAL = Architecture("MixtralForCausalLM", {**_DENSE, **_MIXTRAL}, is_permuted=True, config=_mixtral)
"""Architecture of ``llama`` files that have experts."""


def gguf_architecture(arch: str, metadata: Mapping[str, Any]) -> Architecture | None:
    """Return the architecture of a file by its ``general.architecture``; None for an unknown one."""
    return MIXTRAL if arch == "llama" and metadata.get("llama.expert_count") else ARCHITECTURES.get(arch)
