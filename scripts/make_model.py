"""Write a model folder in a published model's shape: config and a stub tokenizer, no weights, for `--dummy-weight`.

python scripts/make_model.py qwen3-0.6b FOLDER
"""

from __future__ import annotations

import sys

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

COMMON = {
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "eos_token_id": 151645,
}
SHAPES = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
    "qwen3-14b": {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_attention_heads": 40,
        "num_hidden_layers": 40,
    },
    "qwen3-32b": {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_attention_heads": 64,
        "num_hidden_layers": 64,
    },
    "qwen3-30b-a3b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
}


def main(shape: str, folder: str) -> None:
    """Write the folder."""
    is_moe = "num_experts" in SHAPES[shape]
    config_class, architecture = (
        (Qwen3MoeConfig, "Qwen3MoeForCausalLM") if is_moe else (Qwen3Config, "Qwen3ForCausalLM")
    )
    config_class(**(COMMON | SHAPES[shape]), architectures=[architecture]).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"t{index}": index for index in range(COMMON["vocab_size"])}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"t{COMMON['eos_token_id']}").save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in SHAPES:
        sys.exit(f"usage: {sys.argv[0]} {{{','.join(SHAPES)}}} FOLDER")
    main(*sys.argv[1:])
