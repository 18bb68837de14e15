"""Prompts of known lengths.

Content is an array of content ids, each of which becomes one token: a token id for completions, or a word that is one token of
the tokenizer for chats. Equal ids become equal tokens, so that prompts share prefixes as intended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from minisgl_core.errors import InvalidValueError
from minisgl_server.bench.serve.request import Prompt

ContentIds = npt.NDArray[np.int64]
"""Content ids, each below the ``num_content_ids`` of the prompts."""

SCANNED_TOKENS = 10_000
"""Number of token ids that are searched for words: low ids are common words, and a whole vocabulary takes seconds."""

COMMON_WORDS = (
    "the of and to in is was for that it with as his on be at by had not are but from or have an they which one you were her"
    " all she there would their we him been has when who will more no if out so said what up its about into than them can"
    " only other new some could time these two may then do first any my now such like our over man me even most made after"
    " also did many before must through years where much your way well down should because each just those people how too"
    " little good very make world still own see men work long get here between both life being under never day same another"
    " know while last might us great old year off come since against go came right used take three"
)
"""Words that are one token each in most vocabularies."""


class IdHistory:
    """Prompts of one conversation."""

    def __init__(self, prefix: ContentIds) -> None:
        self._ids: list[int] = prefix.tolist()

    def next_prompt(self, content: ContentIds) -> tuple[Prompt, int | None]:
        """Return the prompt that continues the conversation with new content, and its tokens; None if only the server knows."""
        self._ids += content.tolist()
        return self._ids, len(self._ids)

    def add_response(self, text: str, placeholder: ContentIds) -> None:
        """Add the response to the last prompt, or `placeholder` if its tokens are not known."""
        self._ids += placeholder.tolist()


class ChatHistory:
    """Chat of one conversation; see `IdHistory`."""

    def __init__(self, prompts: "Prompts", prefix: ContentIds) -> None:
        self._prompts, self._num_prefix_tokens = prompts, len(prefix)
        self._messages = [{"role": "system", "content": prompts.text(prefix)}] if len(prefix) else []

    def next_prompt(self, content: ContentIds) -> tuple[Prompt, int | None]:
        template = self._prompts.num_template_tokens.get(len(self._messages))
        self._messages.append({"role": "user", "content": self._prompts.text(content)})
        return self._messages, None if template is None else template + self._num_prefix_tokens + len(content)

    def add_response(self, text: str, placeholder: ContentIds) -> None:
        self._messages.append({"role": "assistant", "content": text})


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of token ids, or chats made of words.

    The next prompt of a chat has the response as it was generated. That of token ids has a random placeholder, as completion
    streams have no token ids. The tokens that a chat template adds are not part of the requested lengths.

    Attributes:
        num_content_ids: exclusive upper bound of the content ids.
        words: word of each content id of a chat; empty for prompts of token ids.
        num_template_tokens: tokens that the chat template adds to the first user message, by the number of messages before it,
            0 or 1. Empty if they are not known.
    """

    num_content_ids: int
    words: Sequence[str] = ()
    num_template_tokens: Mapping[int, int] = field(default_factory=dict)

    def start(self, prefix: ContentIds) -> IdHistory | ChatHistory:
        """Start a conversation with a prefix, which may be empty."""
        return ChatHistory(self, prefix) if self.words else IdHistory(prefix)

    def text(self, content: ContentIds) -> str:
        return " ".join(self.words[content_id] for content_id in content.tolist())


def chats_of(tokenizer: Any) -> Prompts:
    """Return chats of words that are one token of a transformers tokenizer each, with and without a leading space."""
    texts = tokenizer.batch_decode([[token] for token in range(min(len(tokenizer), SCANNED_TOKENS))])
    candidates = sorted(
        {text for text in map(str.strip, texts) if text.isascii() and text.isalpha() and 2 <= len(text) <= 12}
    )
    first = tokenizer(candidates, add_special_tokens=False)["input_ids"]
    pairs = tokenizer([f"{word} {word}" for word in candidates], add_special_tokens=False)["input_ids"]
    tokenized = zip(candidates, first, pairs, strict=True)
    words = [word for word, alone, pair in tokenized if len(alone) == 1 and len(pair) == 2]
    if len(words) < 16:
        raise InvalidValueError("--tokenizer", tokenizer.name_or_path, "one that has common words as single tokens")
    return Prompts(len(words), words, {num: _template_tokens(tokenizer, words[: num + 1]) for num in (0, 1)})


def _template_tokens(tokenizer: Any, words: Sequence[str]) -> int:
    """Return the tokens that the chat template adds to a user message; two words make a system message before it."""
    messages = [
        {"role": role, "content": word} for role, word in zip(("system", "user")[-len(words) :], words, strict=True)
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return len(tokenizer.encode(text, add_special_tokens=False)) - len(words)
