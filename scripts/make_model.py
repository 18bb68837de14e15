"""Write a model folder in a published model's shape: config and a stub tokenizer, no weights, for `--dummy-weight`.

python scripts/make_model.py qwen3-0.6b FOLDER
"""

from __future__ import annotations

import sys
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def shape(
    model_type: str, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, **others: Any
) -> dict[str, Any]:
    """Return the keys of a config.json."""
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **others,
    }


QWEN3 = {"vocab": 151936, "head_dim": 128, "max_position_embeddings": 40960, "eos_token_id": 151645}
THETA = {"rope_theta": 1_000_000.0}
W4A16 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*mlp.gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128},
        }
    },
}
GEMMA = {"head_dim": 256, "query_pre_attn_scalar": 256, "tie_word_embeddings": True}
SHAPES = {
    "qwen3-0.6b": shape("qwen3", 1024, 3072, 28, 16, 8, **QWEN3, **THETA, tie_word_embeddings=True),
    "qwen3-14b": shape("qwen3", 5120, 17408, 40, 40, 8, **QWEN3, **THETA),
    "qwen3-32b": shape("qwen3", 5120, 25600, 64, 64, 8, **QWEN3, **THETA),
    "qwen3-30b-a3b": shape(
        *("qwen3_moe", 2048, 6144, 48, 32, 4),
        **QWEN3,
        **THETA,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
    "gemma-2-9b": shape(
        *("gemma2", 3584, 14336, 42, 16, 8, 256000),
        **GEMMA,
        sliding_window=4096,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    ),
    "gemma-3-12b": shape("gemma3_text", 3840, 15360, 48, 16, 8, 262208, **GEMMA, **THETA, sliding_window=1024),
    "phi-4": shape("phi3", 5120, 17920, 40, 40, 10, 100352, rope_theta=250_000.0),
    "olmo-2-13b": shape("olmo2", 5120, 13824, 40, 40, 40, 100352, rope_theta=500_000.0, max_position_embeddings=4096),
    "olmo-3-7b": shape("olmo3", 4096, 11008, 32, 32, 32, 100278, rope_theta=500_000.0, sliding_window=4096),
    "glm-4-9b": shape(
        "glm4", 4096, 13696, 40, 32, 2, 151552, head_dim=128, partial_rotary_factor=0.5, attention_bias=True
    ),
    "granite-3.3-8b": shape(
        *("granite", 4096, 12800, 40, 32, 8, 49159),
        rope_theta=10_000_000.0,
        tie_word_embeddings=True,
        attention_multiplier=0.0078125,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        logits_scaling=16.0,
    ),
    "mixtral-8x7b": shape(
        "mixtral", 4096, 14336, 32, 32, 8, 32000, **THETA, num_local_experts=8, num_experts_per_tok=2
    ),
    "qwen1.5-moe-a2.7b": shape(
        *("qwen2_moe", 2048, 5632, 24, 16, 16, 151936),
        **THETA,
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
    ),
    "gpt-oss-20b": shape(
        *("gpt_oss", 2880, 2880, 24, 64, 8, 201088),
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
        max_position_embeddings=131072,
    ),
}
for each in ("qwen3-14b", "qwen3-30b-a3b"):
    SHAPES[f"{each}-w4a16"] = SHAPES[each] | {"quantization_config": W4A16}


def main(name: str, folder: str) -> None:
    """Write the folder."""
    keys = SHAPES[name]
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[keys["model_type"]]
    AutoConfig.for_model(**keys, architectures=[architecture]).save_pretrained(folder)
    # A word per token, so that each one streams as text, and an EOS token in the files, as in published checkpoints.
    last = keys["vocab_size"] - 1
    words = Tokenizer(WordLevel({f"t{index}": index for index in range(last + 1)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"t{last}").save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in SHAPES:
        sys.exit(f"usage: {sys.argv[0]} {{{','.join(SHAPES)}}} FOLDER")
    main(*sys.argv[1:])
