"""Tiny configs of the registered architectures, and other values of their keys, for tests against transformers.

An architecture that is registered needs an entry in `CASES`. A key of its config class needs other values in `CHANGES` or in its
case. Otherwise it belongs to the keys without effect, which are reviewed by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import GptOssConfig

Patch = Mapping[str, Any]

SIZES: Patch = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: Patch = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@dataclass(frozen=True)
class Case:
    """A tiny config of an architecture.

    Attributes:
        model_type: key of transformers' config class, of a multimodal model that of its text model.
        base: the config, without what transformers' defaults say.
        changes: other values of keys, besides those in `CHANGES`; None for a key that this architecture does not read.
        without_effect: its keys that change nothing in inference, besides `WITHOUT_EFFECT`.
        beside_text: keys beside the ``text_config`` of a multimodal model; the other ones are in it.
    """

    model_type: str
    base: Patch
    changes: Mapping[str, Sequence[Patch]] = field(default_factory=dict)
    without_effect: frozenset[str] = frozenset()
    beside_text: Patch = field(default_factory=dict)

    def raw(self, patch: Patch) -> dict[str, Any]:
        """Return the patched ``config.json``."""
        text = {"model_type": self.model_type, **self.base, **patch}
        if not self.beside_text:
            return text
        beside = {key: text.pop(key, value) for key, value in self.beside_text.items() if key != "model_type"}
        inner = text.pop("text_config", {})
        return {"model_type": self.beside_text["model_type"], **beside, "text_config": {**text, **inner}}

    def patches(self, own: Set[str]) -> dict[str, Sequence[Patch]]:
        """Return the changes of its `own` keys and of those that only other architectures have, by key."""
        unread = WITHOUT_EFFECT | self.without_effect
        known = {**CHANGES, **self.changes}
        return {
            key: patches if key in own else patches[:1] for key, patches in known.items() if key not in own & unread
        }


def values(key: str, *others: Any) -> Sequence[Patch]:
    """Return patches that set `key` to each of `others`."""
    return [{key: other} for other in others]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
THETA = {"rope_theta": 500.0}
WINDOW = {"sliding_window": 5}
KINDS = ["sliding_attention", "full_attention"]

CHANGES: Mapping[str, Sequence[Patch]] = {
    "vocab_size": values("vocab_size", 67),
    "hidden_size": values("hidden_size", 48),
    "intermediate_size": values("intermediate_size", 56),
    "num_hidden_layers": values("num_hidden_layers", 3),
    "num_attention_heads": values("num_attention_heads", 2, 8),
    "num_key_value_heads": values("num_key_value_heads", 1, 4),
    "head_dim": values("head_dim", 8, 16, None),
    "hidden_act": values("hidden_act", "gelu", "relu"),
    "hidden_activation": values("hidden_activation", "gelu", "relu"),
    "max_position_embeddings": [
        {"max_position_embeddings": 128, "rope_parameters": {"rope_type": "yarn", "factor": 4.0, **THETA}}
    ],
    "rms_norm_eps": values("rms_norm_eps", 0.1),
    "tie_word_embeddings": values("tie_word_embeddings", True, False),
    "attention_bias": values("attention_bias", True, False),
    "mlp_bias": values("mlp_bias", True),
    "is_causal": values("is_causal", False),
    "rope_theta": values("rope_theta", 500.0),
    "rope_parameters": [
        {"rope_parameters": each}
        for each in (
            {"rope_type": "default", **THETA},
            {**YARN, **THETA},
            {**YARN, "truncate": False, "beta_fast": 4.0, "beta_slow": 2.0, "attention_factor": 1.7},
            {**YARN, "mscale": 1.3, "mscale_all_dim": 0.6},
            LLAMA3,
            {"rope_type": "linear", "factor": 4.0},
            {"rope_type": "dynamic", "factor": 4.0},
            {"type": "linear", "factor": 4.0, **THETA},
            {"rope_type": "default", "partial_rotary_factor": 0.5, **THETA},
            {"rope_type": "unknown", "factor": 4.0, **THETA},
        )
    ],
    "rope_scaling": [
        {"rope_scaling": YARN},
        {"rope_scaling": {"type": "linear", "factor": 4.0}, **THETA},
        {"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default", **THETA}},
        {"rope_scaling": YARN, "rope_parameters": {**YARN, **THETA}},
        {"rope_scaling": {**YARN, **THETA}, "rope_parameters": {"rope_type": "default", **THETA}},
    ],
    "original_max_position_embeddings": [
        {"original_max_position_embeddings": 8, "rope_scaling": YARN},
        {"original_max_position_embeddings": 8, "rope_scaling": LLAMA3},
        {"original_max_position_embeddings": 8, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"original_max_position_embeddings": 32, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    ],
    "partial_rotary_factor": [
        {"partial_rotary_factor": 0.5},
        {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    ],
    "sliding_window": [
        WINDOW,
        {**WINDOW, "use_sliding_window": True, "max_window_layers": 0},
        {"sliding_window": None},
    ],
    "use_sliding_window": [{"use_sliding_window": True, **WINDOW, "max_window_layers": 0}],
    "max_window_layers": [{"use_sliding_window": True, "max_window_layers": 1, **WINDOW}],
    "layer_types": [
        {"layer_types": KINDS, "use_sliding_window": True, **WINDOW},
        {"layer_types": KINDS, **WINDOW},
        {"layer_types": KINDS[::-1], **WINDOW},
        {"layer_types": ["full_attention"] * 2},
    ],
    "num_experts": values("num_experts", 5),
    "num_local_experts": values("num_local_experts", 5),
    "num_experts_per_tok": values("num_experts_per_tok", 3),
    "moe_intermediate_size": values("moe_intermediate_size", 24),
    "norm_topk_prob": values("norm_topk_prob", True, False),
    "decoder_sparse_step": [{"decoder_sparse_step": 2, "num_hidden_layers": 3}],
    "mlp_only_layers": values("mlp_only_layers", [0]),
    "shared_expert_intermediate_size": values("shared_expert_intermediate_size", 24),
    "n_shared_experts": values("n_shared_experts", 1),
    "routed_scaling_factor": values("routed_scaling_factor", 2.0),
    "attn_logit_softcapping": values("attn_logit_softcapping", 2.0),
    "final_logit_softcapping": values("final_logit_softcapping", 2.0),
    "query_pre_attn_scalar": values("query_pre_attn_scalar", 64),
    "embedding_multiplier": values("embedding_multiplier", 3.0),
    "residual_multiplier": values("residual_multiplier", 0.5),
    "attention_multiplier": values("attention_multiplier", 0.5),
    "logits_scaling": values("logits_scaling", 3.0),
    "use_bidirectional_attention": values("use_bidirectional_attention", True),
    "v_head_dim": values("v_head_dim", 4),
    "attention_sinks": values("attention_sinks", True),  # transformers has no such key: gpt-oss alone has sinks
    "use_qk_norm": values("use_qk_norm", True, False),
    "layernorm_epsilon": values("layernorm_epsilon", 0.1),
    "quantization_config": values("quantization_config", {"quant_method": "unknown"}),
}
"""Patches by the key that they are about; all but the first of a patch's keys are what makes it matter."""

WITHOUT_EFFECT = frozenset(
    {
        *("_name_or_path", "architectures", "model_type", "transformers_version", "auto_map"),  # names of the model
        *("dtype", "torch_dtype"),  # overridden by --dtype; the tests compare in float32
        *("pad_token_id", "bos_token_id", "eos_token_id"),  # for the scheduler and the tokenizer; tested in test_hf.py
        *("attention_dropout", "initializer_range", "pretraining_tp", "router_aux_loss_coef", "output_router_logits"),
        *("use_cache", "output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward"),
        *(
            "is_encoder_decoder",
            "id2label",
            "label2id",
            "problem_type",
            "resid_pdrop",
            "embd_pdrop",
            "router_jitter_noise",
        ),
    }
)
"""Keys of training, of transformers' own outputs, and of what is not the model's computation. Reviewed by hand."""

BY_KIND: Sequence[Patch] = [
    {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}, **extra}
    for full, sliding, extra in (
        ({"rope_type": "default", **THETA}, {"rope_type": "default", "rope_theta": 50.0}, {}),
        ({"rope_type": "linear", "factor": 4.0, **THETA}, {"rope_type": "default", **THETA}, {}),
        ({**YARN, **THETA}, {"rope_type": "default", **THETA}, {}),
    )
]
"""A rotary embedding per kind of layer."""

DENSE_LAYER: Mapping[str, Sequence[Patch]] = {"intermediate_size": [{"intermediate_size": 56, "mlp_only_layers": [0]}]}
"""A width that only dense layers have."""

ALIASES: Mapping[str, str] = {
    "hidden_activation": "hidden_act",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
}
"""Keys that are read as another one, which messages name."""

GEMMA_3 = Case(
    "gemma3_text",
    {**SIZES, "num_hidden_layers": 3, "head_dim": 12, "query_pre_attn_scalar": 16, "sliding_window_pattern": 3},
    {
        "num_hidden_layers": values("num_hidden_layers", 4),
        "rope_parameters": BY_KIND,
        "max_position_embeddings": [{"max_position_embeddings": 128, **BY_KIND[2]}],
        "layer_types": [{"layer_types": [*KINDS, "sliding_attention"], **WINDOW}],
        "sliding_window_pattern": [{"sliding_window_pattern": 2, **WINDOW}],
    },
    # transformers reads the first from sliding_window_pattern, and ignores the second; the engine refuses it.
    frozenset({"_sliding_window_pattern", "attn_logit_softcapping"}),
)

CASES: Mapping[str, Case] = {
    "Gemma2ForCausalLM": Case(
        "gemma2",
        {**SIZES, "head_dim": 12, "query_pre_attn_scalar": 16},
        without_effect=frozenset({"use_bidirectional_attention"}),
    ),
    "Gemma3ForCausalLM": GEMMA_3,
    "Gemma3ForConditionalGeneration": replace(
        GEMMA_3,
        # transformers reads it outside text_config only.
        changes={**GEMMA_3.changes, "text_config": values("text_config", {"tie_word_embeddings": False})},
        # The first are for images. transformers ignores the others in text; the engine refuses them.
        without_effect=GEMMA_3.without_effect
        | {"boi_token_index", "eoi_token_index", "image_token_index", "mm_tokens_per_image", "vision_config"}
        | {"final_logit_softcapping", "use_bidirectional_attention"},
        beside_text={
            "model_type": "gemma3",
            "vision_config": {
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
                "image_size": 28,
                "patch_size": 14,
            },
            "mm_tokens_per_image": 4,
            "boi_token_index": 58,
            "eoi_token_index": 59,
            "image_token_index": 60,
            "tie_word_embeddings": True,
        },
    ),
    "Glm4ForCausalLM": Case("glm4", {**SIZES, "head_dim": 16}),
    "Glm4MoeForCausalLM": Case(
        "glm4_moe",
        {
            **SIZES,
            "head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "num_nextn_predict_layers": 0,
        },
        {
            "n_routed_experts": values("n_routed_experts", 5),
            "n_group": [{"n_group": 2, "topk_group": 1}],
            "topk_group": [{"n_group": 2, "topk_group": 1}],
            "first_k_dense_replace": values("first_k_dense_replace", 0, 2),
            "n_shared_experts": values("n_shared_experts", 2),
        },
        frozenset({"num_nextn_predict_layers"}),  # layers for multi-token prediction, which transformers does not have
    ),
    "GptOssForCausalLM": Case(
        "gpt_oss",
        {**SIZES, "head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7},
        # Older versions of transformers ignore the config and use the published models' values.
        {"swiglu_limit": values("swiglu_limit", 1.0), "swiglu_alpha": values("swiglu_alpha", 1.0)}
        if "swiglu_limit" in GptOssConfig().to_dict()
        else {},
        frozenset({"hidden_act"}),  # its experts have another activation
    ),
    "GraniteForCausalLM": Case("granite", SIZES),
    "LlamaForCausalLM": Case("llama", SIZES, {"head_dim": values("head_dim", 16, None)}),
    "MistralForCausalLM": Case("mistral", SIZES),
    "MixtralForCausalLM": Case("mixtral", {**SIZES, "num_local_experts": 4}),
    "Olmo2ForCausalLM": Case("olmo2", SIZES),
    "Olmo3ForCausalLM": Case(
        "olmo3",
        {**SIZES, "num_hidden_layers": 4, "sliding_window": 7},
        {
            "rope_parameters": BY_KIND,
            "max_position_embeddings": [{"max_position_embeddings": 128, **BY_KIND[2]}],
            "layer_types": [{"layer_types": KINDS * 2}, {"layer_types": ["full_attention"] * 4}],
        },
    ),
    "Phi3ForCausalLM": Case("phi3", SIZES),
    "Qwen2ForCausalLM": Case("qwen2", SIZES),
    "Qwen2MoeForCausalLM": Case(
        "qwen2_moe",
        {**SIZES, **EXPERTS, "shared_expert_intermediate_size": 20},
        {
            **DENSE_LAYER,
            "qkv_bias": values("qkv_bias", False),
            "sliding_window": [{"use_sliding_window": True, "max_window_layers": 2, **WINDOW}],
            "use_sliding_window": [{"use_sliding_window": True, "max_window_layers": 2, **WINDOW}],
        },
    ),
    "Qwen3ForCausalLM": Case("qwen3", {**SIZES, "head_dim": 12}),
    "Qwen3MoeForCausalLM": Case(
        "qwen3_moe",
        {**SIZES, **EXPERTS, "head_dim": 12},
        DENSE_LAYER,
    ),
}
"""By the name of the entry point."""

KIT_TESTS = (
    "test_logits_equal_the_reference",
    "test_chunked_prefill_and_decode_equal_the_reference",
    "test_batched_sequences_are_independent",
    "test_tensor_parallel_logits_equal_the_reference[2]",
    "test_pipeline_parallel_logits_equal_the_reference[1]",
)
"""Tests of the model kit that docs/models.md describes."""
