"""Tokenization of prompts, conversations and bad words."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from minisgl_core.errors import InvalidValueError
from minisgl_core.sampling_params import SamplingParams
from minisgl_core.text.chat import render_chat
from minisgl_core.utils.exceptions import is_rust_panic

_FIRST_CHARS = 2**14
"""Characters that are tokenized first, which takes about 10 ms."""
_EXTRA_TOKENS = 256
"""Margin for a cut, which may split words: a part of a text may have more tokens than the same part within the whole text."""


def list_prompts(prompts: Any) -> list[Any]:
    """Return a list of prompts from one prompt or several; a prompt is a text or a list of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidValueError("prompts", prompts, "a string, a list of token ids, or a list of those")
    return [prompts] if prompts and isinstance(prompts[0], Integral) else list(prompts)


def token_array(ids: Any) -> npt.NDArray[np.int32]:
    """Return a list of token ids as an array. An id that does not fit in int32 becomes one that no vocabulary has."""
    try:
        array = np.asarray(ids)
    except ValueError:  # lists of different lengths
        array = np.empty((0, 0))
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise InvalidValueError("prompt", ids, "a string or a list of token ids")
    small = array.astype(np.int32)
    if not np.array_equal(small, array):
        small = array.astype(np.int64).clip(-(2**31), 2**31 - 1).astype(np.int32)
    return small


def encode_prompt(
    tokenizer: Any,
    text: str,
    add_special_tokens: bool = True,
    max_tokens: int | None = None,
    name: str = "prompt",
    truncation_side: Literal["left", "right"] = "right",
) -> list[int]:
    """Return the tokens of a plain text, with the tokenizer's BOS if `add_special_tokens`.

    Args:
        tokenizer: a transformers tokenizer.
        text: the text.
        add_special_tokens: add the special tokens that the tokenizer adds by itself.
        max_tokens: stop early once the beginning of `text` has clearly more tokens. Then only those tokens are returned,
            which are more than `max_tokens`.
        name: field of the text, for errors.
        truncation_side: ``left`` for the end of `text` instead of its beginning.

    Raises:
        InvalidValueError: the text contains a lone surrogate, which cannot be encoded, or the tokenizer fails.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        allowed = "text without lone surrogates"
        raise InvalidValueError(name, text[error.start :][:20], allowed) from None
    length = len(text) if max_tokens is None else max(_FIRST_CHARS, max_tokens)
    while True:
        part = text[:length] if truncation_side == "right" else text[-length:]
        try:
            ids: list[int] = tokenizer(part, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        except BaseException as error:
            # The tokenizers package raises `Exception` itself, such as for an unknown word without an unknown token.
            # It panics if a regex backtracks more than 10^7 times, as Qwen's does for so many spaces.
            if type(error) is not Exception and not is_rust_panic(error):
                raise
            raise InvalidValueError(
                name, part[:20], "text that the tokenizer can split", f"It says: {error}."
            ) from None
        # The cut may change the tokens next to it, so their number has to be clearly too large.
        if length >= len(text) or (max_tokens is not None and len(ids) > max_tokens + max_tokens // 8 + _EXTRA_TOKENS):
            return ids
        length *= 2


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """Return the tokens of a conversation, up to the beginning of the assistant's answer; see `render_chat`.

    The template writes the BOS if the model needs one, so the tokenizer adds none.
    """
    text = render_chat(tokenizer, messages, chat_template_kwargs, tools)
    return encode_prompt(tokenizer, text, add_special_tokens=False)


def bad_word_tokens(tokenizer: Any, sampling: SamplingParams) -> list[list[int]]:
    """Return the token sequences of `sampling`'s ``bad_words``, like vLLM.

    Many vocabularies have other tokens for a word at the beginning of a text than for one after a space. So the sequence
    after a space is banned too, if it begins with another token and has the same length. A longer one begins with a separate
    token for the space and ends with the first sequence, so that it needs no entry.
    """
    found: list[list[int]] = []
    for word in sampling.bad_words:
        texts = word.lstrip(), f" {word.lstrip()}"
        plain, spaced = (encode_prompt(tokenizer, text, False, name="bad_words") for text in texts)
        if not plain:
            raise InvalidValueError("bad_words", word, "more than white space")
        found.append(plain)
        if spaced[0] != plain[0] and len(spaced) == len(plain):
            found.append(spaced)
    return found
