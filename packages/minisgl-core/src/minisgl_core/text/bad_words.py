"""Token sequences of the ``bad_words`` of a request."""

from typing import Any

from minisgl_core.errors import InvalidValueError
from minisgl_core.sampling_params import SamplingParams
from minisgl_core.text.prompt import encode_prompt


def bad_word_tokens(tokenizer: Any, sampling: SamplingParams) -> list[list[int]]:
    """Return the token sequences of `sampling`'s ``bad_words``, like vLLM.

    Many vocabularies have other tokens for a word at the beginning of a text than for one after a space. So the sequence
    after a space is banned too, if it begins with another token and has the same length. A longer one begins with a separate
    token for the space and ends with the first sequence, so that it needs no entry.

    Raises:
        InvalidValueError: a word consists of white space only.
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
