"""Prompts of known lengths.

Content is made as numbers, each of which becomes one token: a token id where the server takes ids, else a word that the
server's tokenizer has as one token. Equal numbers make equal tokens, so prefixes are shared as they are meant to be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from minisgl_core.errors import InvalidValueError
from minisgl_server.bench.serve.request import Prompt

Numbers = npt.NDArray[np.int64]
"""Content; each below `PromptMaker.num_words`."""

SCANNED_TOKENS = 10_000
"""Ids among which words are looked for: the lowest are the most common, and those of a whole vocabulary take seconds."""

_COMMON_WORDS = (
    "the of and to in is was for that it with as his on be at by had not are but from or have an they which one you were her"
    " all she there would their we him been has when who will more no if out so said what up its about into than them can"
    " only other new some could time these two may then do first any my now such like our over man me even most made after"
    " also did many before must through years where much your way well down should because each just those people how too"
    " little good very make world still own see men work long get here between both life being under never day same another"
    " know while last might us great old year off come since against go came right used take three"
)


class History(Protocol):
    """A conversation as the server sees it."""

    num_tokens: int | None
    """Of the prompt that `ask` returned last; None where only the server knows."""

    def ask(self, numbers: Numbers) -> Prompt:
        """The prompt that goes on with new content."""

    def hear(self, answer: str, stand_in: Numbers) -> None:
        """Note the answer to it; where its tokens are not known, the content that stands in for them."""


class PromptMaker(Protocol):
    """Turns numbers into prompts."""

    num_words: int

    def start(self, prefix: Numbers) -> History:
        """A conversation that begins with `prefix`, which may be empty."""


class _IdHistory:
    def __init__(self, prefix: Numbers) -> None:
        self._ids: list[int] = prefix.tolist()
        self.num_tokens: int | None = None

    def ask(self, numbers: Numbers) -> Prompt:
        self._ids += numbers.tolist()
        self.num_tokens = len(self._ids)
        return self._ids

    def hear(self, answer: str, stand_in: Numbers) -> None:
        self._ids += stand_in.tolist()


class IdPrompts:
    """Token ids. A stream of a completion does not tell its tokens, so random ones of its length stand in for an answer."""

    def __init__(self, vocab_size: int) -> None:
        """Ids are drawn below `vocab_size`."""
        self.num_words = vocab_size

    def start(self, prefix: Numbers) -> History:
        """See `PromptMaker`."""
        return _IdHistory(prefix)


class _ChatHistory:
    def __init__(self, maker: ChatPrompts, prefix: Numbers) -> None:
        self._maker, self._num_prefix_tokens = maker, len(prefix)
        self._messages = [{"role": "system", "content": maker.text(prefix)}] if len(prefix) else []
        self.num_tokens: int | None = None

    def ask(self, numbers: Numbers) -> Prompt:
        template = self._maker.num_template_tokens.get(len(self._messages))
        self.num_tokens = None if template is None else template + self._num_prefix_tokens + len(numbers)
        self._messages.append({"role": "user", "content": self._maker.text(numbers)})
        return self._messages

    def hear(self, answer: str, stand_in: Numbers) -> None:
        self._messages.append({"role": "assistant", "content": answer})


class ChatPrompts:
    """Messages made of words; an answer goes into the next prompt as it was given.

    What the chat template adds comes on top of the lengths asked for.

    Args:
        words: what the numbers stand for.
        num_template_tokens: what the template adds to the first message of a user, by the number of messages before it:
            none, or that of the system. Empty where it is not known.
    """

    def __init__(self, words: Sequence[str], num_template_tokens: Mapping[int, int]) -> None:
        self._words, self.num_template_tokens = words, num_template_tokens
        self.num_words = len(words)

    @classmethod
    def of_tokenizer(cls, tokenizer: Any) -> ChatPrompts:
        """With words that are one token each, after a space and without, found in a transformers tokenizer."""
        texts = tokenizer.batch_decode([[token] for token in range(min(len(tokenizer), SCANNED_TOKENS))])
        candidates = {text.strip() for text in texts if text.strip().isascii() and text.strip().isalpha()}
        words = sorted(_single_tokens(tokenizer, (word for word in candidates if 2 <= len(word) <= 12)))
        if len(words) < 16:
            raise InvalidValueError("--tokenizer", tokenizer.name_or_path, "one that has common words as single tokens")
        return cls(words, {0: _template_tokens(tokenizer, words[:1]), 1: _template_tokens(tokenizer, words[:2])})

    @classmethod
    def approximate(cls) -> ChatPrompts:
        """With common words, which are one token each in most vocabularies."""
        return cls(_COMMON_WORDS.split(), {})

    def start(self, prefix: Numbers) -> History:
        """See `PromptMaker`."""
        return _ChatHistory(self, prefix)

    def text(self, numbers: Numbers) -> str:
        """Content as text."""
        return " ".join(self._words[number] for number in numbers.tolist())


def _template_tokens(tokenizer: Any, words: Sequence[str]) -> int:
    """What the template adds to a message of the user, after one of the system where there are two words."""
    messages = [
        {"role": role, "content": word} for role, word in zip(("system", "user")[-len(words) :], words, strict=True)
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return len(tokenizer.encode(text, add_special_tokens=False)) - len(words)


def _single_tokens(tokenizer: Any, words: Iterable[str]) -> Iterable[str]:
    """Those that stay one token each wherever they stand in a text of words."""
    listed = sorted(words)
    first = tokenizer(listed, add_special_tokens=False)["input_ids"]
    pairs = tokenizer([f"{word} {word}" for word in listed], add_special_tokens=False)["input_ids"]
    return (word for word, one, two in zip(listed, first, pairs, strict=True) if len(one) == 1 and len(two) == 2)
