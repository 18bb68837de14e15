"""Token sequences of words that must not be generated."""

from __future__ import annotations

from typing import Any

from minisgl_core.errors import InvalidValueError
from minisgl_core.sampling_params import SamplingParams
from minisgl_core.text.prompt import encode_prompt


def bad_word_tokens(tokenizer: Any, sampling: SamplingParams) -> list[list[int]]:
    """Return the token sequences of `sampling`'s ``bad_words``, as vLLM has them.

    A word stands at the beginning of a text or after a space, which many vocabularies write as other tokens. So its sequence
    after a space counts too, where it begins with another token and is as long; a longer one begins with a token of its own
    for the space, and ends as the first does.

    Raises:
        InvalidValueError: a word is white space alone.
    """
    found: list[list[int]] = []
    for word in sampling.bad_words:
        plain, spaced = (
            encode_prompt(tokenizer, text, False, name="bad_words") for text in (word.lstrip(), f" {word.lstrip()}")
        )
        if not plain:
            raise InvalidValueError("bad_words", word, "more than white space")
        found.append(plain)
        if spaced[0] != plain[0] and len(spaced) == len(plain):
            found.append(spaced)
    return found
