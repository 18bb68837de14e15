"""Folders with a tiny random model and a tokenizer, for `LLM` and `minisgl launch`."""

from __future__ import annotations

import shutil
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import tiny
import torch

CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w9{% endif %}"


def words(token_ids: list[int]) -> str:
    """Decode tokens like the folders' tokenizers, without the special tokens 0 to 2."""
    return " ".join(f"w{token}" for token in token_ids if token > 2)


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer with a word per token: w3, w4, ..."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2"}
    tokenizer = Tokenizer(WordLevel({f"w{token}": token for token in range(tiny.VOCAB_SIZE)}, unk_token="w3"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE, **special).save_pretrained(folder)


@lru_cache
def llama() -> str:
    """Write `tiny.checkpoint` with a tokenizer."""
    folder = Path(mkdtemp(prefix="tiny-llama-words-"))
    shutil.copytree(tiny.checkpoint(), folder, dirs_exist_ok=True)
    save_tokenizer(folder)
    return str(folder)


@lru_cache
def qwen3_moe() -> str:
    """Write a model with four experts in two of three layers."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(5)
    config: Any = Qwen3MoeConfig(
        vocab_size=tiny.VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
        max_position_embeddings=256,
        initializer_range=0.4,
        bos_token_id=1,
        eos_token_id=tiny.EOS,
        pad_token_id=0,
    )
    folder = Path(mkdtemp(prefix="tiny-qwen3-moe-"))
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)
