"""A model's tokenizer as llguidance is to see it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import copy
from typing import Any

import llguidance

_UNSPELLED = "\U0010fffd"
"""A character for private use, which no text has that is to be generated."""


def read_tokenizer(tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> llguidance.LLTokenizer:
    """Like `llguidance.hf.from_tokenizer`, but special tokens have other names.

    llguidance has the tokenizer cut the text that a grammar forces into tokens. Text that spells a special token would become
    that token, which the parser does not take for text.

    Args:
        tokenizer: a fast one of transformers'.
        vocab_size: of the tokenizer, or of a model with more tokens.
        eos_token_ids: that end outputs.

    Raises:
        Exception: llguidance cannot read it; its errors share no base.
    """
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ValueError("it is not one of the fast tokenizers")
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    written = json.loads(backend.to_str())
    names = {}
    for token in written["added_tokens"]:
        if token["special"]:
            names[token["content"]] = token["content"] = _UNSPELLED + token["content"]
    model = written["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(text, text): place for text, place in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(text, text), *rest] for text, *rest in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return llguidance.LLTokenizer(json.dumps(written), n_vocab=vocab_size, eos_token=list(eos_token_ids))
