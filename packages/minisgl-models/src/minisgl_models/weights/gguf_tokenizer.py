"""Conversion of a GGUF file's vocabulary to a transformers tokenizer: byte-level BPE and SentencePiece.

transformers' own conversion is not used. It takes seconds, knows few pre-tokenizers, and loses leading spaces.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from minisgl_core.errors import ModelFormatError, TokenizerNotFoundError
from minisgl_core.utils.exceptions import one_line
from minisgl_models.weights.gguf_pre_tokenizers import PRE_TOKENIZERS

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_SPACE = "▁"
_KEEP_SPACES_AFTER = ("<unk>", "<s>", "<|endoftext|>")
"""Control tokens after which Phi-3's tokenizer keeps spaces."""
_MAX_PIECE_LENGTH = 256
"""Longest token of a SentencePiece vocabulary, in characters. Its merges take time in the square of its length."""
_MAX_MERGES = 2**22
"""Maximum number of merges of a SentencePiece vocabulary. Gemma 3's has about 2**19."""


def build_tokenizer(path: Path, metadata: Mapping[str, Any]) -> Any:
    """Build a fast transformers tokenizer with the file's special tokens and chat template. Messages name `path`.

    Raises:
        TokenizerNotFoundError: the file has no vocabulary.
        ModelFormatError: its vocabulary has another type or pre-tokenizer than those supported, or is damaged.
    """
    from transformers import PreTrainedTokenizerFast

    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise TokenizerNotFoundError(f"{path} holds no tokenizer (tokenizer.ggml.tokens is missing)")
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL_TOKENS.items()}
    special = {name: tokens[i] for name, i in ids.items() if i is not None and 0 <= i < len(tokens)}
    for key in ("token_type", "scores"):
        values = metadata.get(f"tokenizer.ggml.{key}", [])
        if values and len(values) != len(tokens):
            raise ModelFormatError(f"{path}: tokenizer.ggml.{key} has {len(values)} entries for {len(tokens)} tokens")
    model = metadata.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise ModelFormatError(
            f"{path}: tokenizer.ggml.model={model!r} is not supported; gpt2 (byte-level BPE) and llama (SentencePiece) are"
        )
    pre = metadata.get("tokenizer.ggml.pre")
    if model == "gpt2" and pre not in PRE_TOKENIZERS:
        raise ModelFormatError(
            f"{path}: tokenizer.ggml.pre={pre!r} is not supported (known: {', '.join(PRE_TOKENIZERS)}); its pre-tokenizer is not "
            "known, and another one would give other tokens"
        )
    try:
        backend = _byte_level(metadata) if model == "gpt2" else _sentencepiece(metadata)
    except Exception as error:  # the tokenizers package raises Exception itself
        raise ModelFormatError(f"{path}: its tokenizer cannot be built: {one_line(error, 200)}") from error
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)
    tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    if context := metadata.get(f"{metadata.get('general.architecture')}.context_length"):
        tokenizer.model_max_length = context
    return tokenizer


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    pre_tokenizer_spec = PRE_TOKENIZERS[metadata["tokenizer.ggml.pre"]]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    if wrong := [merge for merge in merges if len(merge) != 2]:
        raise ValueError(f"tokenizer.ggml.merges has {wrong[0][0][:40]!r}, not two tokens separated by a space")
    vocab = {token: index for index, token in enumerate(tokens)}
    # The tokenizers package panics if the two make a token that is longer than all tokens.
    if unknown := next((merge for merge in merges if "".join(merge) not in vocab), None):
        raise ValueError(
            f"tokenizer.ggml.merges has {' '.join(unknown)[:80]!r}, which make no token of tokenizer.ggml.tokens"
        )
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre_tokenizer_spec.ignores_merges))
    tokenizer.pre_tokenizer = pre_tokenizer_spec.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    if pre_tokenizer_spec.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    _add_tokens(tokenizer, metadata)
    _add_template(tokenizer, metadata, pre_tokenizer_spec.adds_bos, processors.ByteLevel(trim_offsets=False))
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    """Convert a SentencePiece vocabulary, as llama.cpp applies it: BPE on the whole text by the scores of the merged pieces.

    Unless ``add_space_prefix`` is false, text at the start and after each special token is prefixed with a space.
    """
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    unk_token = tokens[unknown] if unknown is not None and 0 <= unknown < len(tokens) else None
    vocab = {token: index for index, token in reversed(list(enumerate(tokens)))}  # the first of equal tokens counts
    model = models.BPE(
        vocab=vocab, merges=_merges(metadata, vocab), unk_token=unk_token, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if has_prefix else spaces
    stripped = [decoders.Strip(" ", left=1)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
    )
    _add_tokens(tokenizer, metadata)
    _add_template(tokenizer, metadata, True, None)
    return tokenizer


def _merges(metadata: Mapping[str, Any], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make a token, by decreasing score; for equal scores, those of similar lengths first.

    Raises:
        ValueError: the vocabulary has no scores, or its tokens are too long or make too many pairs.
    """
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.scores", [])
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if not scores:
        raise ValueError("tokenizer.ggml.scores is missing")
    pieces = {token for token, kind in zip(tokens, types, strict=True) if kind in (_NORMAL, _USER_DEFINED, _UNUSED)}
    longest = max(pieces, key=len, default="")
    if len(longest) > _MAX_PIECE_LENGTH:
        raise ValueError(
            f"tokenizer.ggml.tokens has {longest[:40]!r}... of {len(longest)} characters at index {vocab[longest]}; at most "
            f"{_MAX_PIECE_LENGTH} are supported"
        )
    merges = []
    for piece in pieces:
        for length in range(1, len(piece)):
            left, right = piece[:length], piece[length:]
            if left in pieces and right in pieces:
                merges.append((-scores[vocab[piece]], abs(len(left) - len(right)), left, right))
        if len(merges) > _MAX_MERGES:
            raise ValueError(f"tokenizer.ggml.tokens has more than {_MAX_MERGES} pairs of tokens that make a token")
    return [(left, right) for *_, left, right in sorted(merges)]


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Add the tokens that are split off before the vocabulary is applied."""
    types, tokens = metadata.get("tokenizer.ggml.token_type", []), metadata["tokenizer.ggml.tokens"]
    # Phi-3's tokens strip the spaces after them (rstrip). Its files do not say so; as in llama.cpp, the name decides.
    name = str(metadata.get("general.name", "")).lower()
    is_phi3 = "phi-3" in name or "phi3" in name
    whole = [(token, kind) for token, kind in zip(tokens, types, strict=False) if kind in (_CONTROL, _USER_DEFINED)]
    control = [
        AddedToken(token, special=True, normalized=False, rstrip=is_phi3 and token not in _KEEP_SPACES_AFTER)
        for token, kind in whole
        if kind == _CONTROL
    ]
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in whole if kind == _USER_DEFINED])


def _add_template(tokenizer: Tokenizer, metadata: Mapping[str, Any], adds_bos: bool, first: Any) -> None:
    """Add BOS and EOS as the metadata specify, by default BOS if `adds_bos`, after the post-processor `first`."""
    tokens = metadata["tokenizer.ggml.tokens"]
    added = []
    for name, default in (("bos", adds_bos), ("eos", False)):
        index = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if index is not None and metadata.get(f"tokenizer.ggml.add_{name}_token", default):
            if not 0 <= index < len(tokens):
                raise ValueError(f"tokenizer.ggml.{name}_token_id={index} is not below the {len(tokens)} tokens")
            # The template has names in place of the tokens, since a token "$B" would mean the second text.
            added.append({"id": name, "ids": [index], "tokens": [tokens[index]]})
    names = [each["id"] for each in added]
    single = [name for name in ("bos", "$A", "eos") if name == "$A" or name in names]
    template = processors.TemplateProcessing(
        single=single, pair=[*single, *(name.replace("$A", "$B") for name in single)], special_tokens=added
    )
    steps = [each for each in (first, template if added else None) if each is not None]
    if steps:
        tokenizer.post_processor = processors.Sequence(steps)
