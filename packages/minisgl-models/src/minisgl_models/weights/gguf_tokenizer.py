"""Conversion of a GGUF file's vocabulary to a transformers tokenizer.

Byte-level BPE vocabularies, which most models have, are converted here. In transformers' own conversion, the pre-tokenizer
depends on the version of transformers, and it takes seconds. Other vocabularies are converted by transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from minisgl_core.errors import ModelFormatError, TokenizerNotFoundError

_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "qwen2": _QWEN2, "tekken": _TEKKEN}
_SPLITS |= {"deepseek-r1-qwen": _QWEN2, "smaug-bpe": _LLAMA3, "falcon3": _LLAMA3}
_GPT2_KINDS = {"gpt-2", "default", "smollm", "starcoder", "refact", "command-r"}
_DIGIT_KINDS = {"smollm", "starcoder", "refact", "command-r"}
_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def build_tokenizer(path: Path, metadata: Mapping[str, Any]) -> Any:
    """Build a fast transformers tokenizer with the file's special tokens and chat template.

    Args:
        path: the file, for vocabularies that transformers converts.
        metadata: its metadata.

    Raises:
        TokenizerNotFoundError: the file has no vocabulary.
        ModelFormatError: its vocabulary cannot be converted.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise TokenizerNotFoundError(f"{path} holds no tokenizer (tokenizer.ggml.tokens is missing)")
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL_TOKENS.items()}
    special = {name: tokens[i] for name, i in ids.items() if i is not None and 0 <= i < len(tokens)}
    types = metadata.get("tokenizer.ggml.token_type", [])
    if types and len(types) != len(tokens):
        raise ModelFormatError(f"{path}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    kind = metadata.get("tokenizer.ggml.pre", "default")
    if metadata.get("tokenizer.ggml.model") == "gpt2" and (kind in _SPLITS or kind in _GPT2_KINDS):
        try:
            backend = _byte_level(metadata, kind)
        except Exception as error:  # the tokenizers package raises Exception itself
            raise ModelFormatError(f"{path}: its tokenizer cannot be built: {_cause(error)}") from error
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
        except Exception as error:
            raise ModelFormatError(f"{path}: its tokenizer cannot be converted: {_cause(error)}") from error
        for name, token in special.items():
            setattr(tokenizer, name, token)
    tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    if context := metadata.get(f"{metadata.get('general.architecture')}.context_length"):
        tokenizer.model_max_length = context
    return tokenizer


def _cause(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def _byte_level(metadata: Mapping[str, Any], kind: str) -> Tokenizer:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type", [])
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    if wrong := [merge for merge in merges if len(merge) != 2]:
        raise ValueError(f"tokenizer.ggml.merges has {wrong[0][0][:40]!r}, not two tokens separated by a space")
    is_llama3 = _SPLITS.get(kind) == _LLAMA3
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=is_llama3))
    tokenizer.pre_tokenizer = _pre_tokenizer(kind)
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    whole = [(token, kind) for token, kind in zip(tokens, types, strict=False) if kind in (_CONTROL, _USER_DEFINED)]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in whole if k == _CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, k in whole if k == _USER_DEFINED])
    _add_template(tokenizer, metadata, adds_bos=is_llama3)
    return tokenizer


def _pre_tokenizer(kind: str) -> Any:
    if kind in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[kind]), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind in _DIGIT_KINDS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    return gpt2


def _add_template(tokenizer: Tokenizer, metadata: Mapping[str, Any], adds_bos: bool) -> None:
    """Add BOS and EOS as the metadata specifies. As in llama.cpp, the default is BOS for Llama 3 and none for others."""
    tokens = metadata["tokenizer.ggml.tokens"]
    added = {}
    for name, default in (("bos", adds_bos), ("eos", False)):
        index = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if index is not None and metadata.get(f"tokenizer.ggml.add_{name}_token", default):
            if not 0 <= index < len(tokens):
                raise ValueError(f"tokenizer.ggml.{name}_token_id={index} is not below the {len(tokens)} tokens")
            added[name] = (tokens[index], index)
    byte_level = processors.ByteLevel(trim_offsets=False)
    if not added:
        tokenizer.post_processor = byte_level
        return
    pieces = [
        added[name][0] if name != "text" else "$A" for name in ("bos", "text", "eos") if name == "text" or name in added
    ]
    template = processors.TemplateProcessing(
        single=pieces,
        pair=[*pieces, *(piece.replace("$A", "$B") for piece in pieces)],
        special_tokens=list(added.values()),
    )
    tokenizer.post_processor = processors.Sequence([byte_level, template])
