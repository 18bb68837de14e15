"""Conversion of a model's tokenizer for llguidance."""

import json
from collections.abc import Sequence
from copy import copy
from typing import Any

import llguidance

_PRIVATE_PREFIX = "\U0010fffd"
"""A private-use character, which no generated text contains."""


def read_tokenizer(tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> llguidance.LLTokenizer:
    """Convert a tokenizer as `llguidance.hf.from_tokenizer` does, but rename its special tokens.

    Where llguidance tokenizes text itself, text that spells a special token would become that token, which the parser does not
    treat as text. It does so for forced tokens, which are off; see `lark.NO_FORCING`.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab_size: size of the tokenizer's vocabulary, or of the model's if that is larger.
        eos_token_ids: tokens that end an output.

    Raises:
        Exception: llguidance cannot read it; its exceptions have no common base class.
    """
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ValueError("it is not a fast tokenizer")
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    serialized = json.loads(backend.to_str())
    names = {}
    for token in serialized["added_tokens"]:
        if token["special"]:
            names[token["content"]] = token["content"] = _PRIVATE_PREFIX + token["content"]
    model = serialized["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(text, text): token_id for text, token_id in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(text, text), *rest] for text, *rest in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return llguidance.LLTokenizer(json.dumps(serialized), n_vocab=vocab_size, eos_token=list(eos_token_ids))
