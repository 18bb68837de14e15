"""Contract of grammar backends for constrained decoding: token masks of structured outputs.

Masks are packed: bit ``t % 32`` of word ``t // 32`` is set if token ``t`` may come next. Shape legend: V vocabulary,
W = ceil(V / 32) words.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt

from minisgl_core.errors import InvalidValueError, Summary

Masks = npt.NDArray[np.int32]
"""One packed mask [W], or several [N, W]."""
_MANY_TOKENS = 16
"""Number of tokens from which `clear_tokens` is vectorized; for fewer, that takes longer."""

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "tool_calls", "structural_tag"]
"""Kind of a grammar's text:

- ``json_object``: empty; any JSON object.
- ``json_schema``: a JSON schema. Its member ``x-whitespace`` (`WHITESPACE`) sets the whitespace of the output.
- ``regex``: a pattern that the whole output matches.
- ``choice``: a JSON list of texts; the output is one of them.
- ``grammar``: a context-free grammar, in Lark's notation with the start rule ``start``, or in EBNF, whose rules have ``::=``,
  with the start rule ``root``.
- ``tool_calls``: a JSON object with ``begin``, ``calls``, ``separator``, ``end``, ``max_calls`` (a number or null) and
  ``otherwise``. The output is one or more of the calls, with the separator (a text) between them, between the texts ``begin`` and
  ``end``. If ``otherwise`` is not null, it is a schema of an alternative output. Or it is an object with ``triggers``, which has
  lists of calls by trigger, and the output is like that of a ``structural_tag``. If a tag such as ``<tool_call>`` is a token,
  the output has that token. A call is a list of parts, which follow each other:

  - a text;
  - ``{"schema": ...}``: a JSON value;
  - ``{"patterns": [...], "excludes": [...], "end": ...}``: a text that matches all of one or more patterns as a whole and
    contains no text of ``excludes``, followed by the text ``end``. If the end is not a token, ``excludes`` has it or it cannot
    be part of a match;
  - ``{"optional": [...]}``: parts or nothing;
  - ``{"any_of": [[...], ...]}``: the parts of one of the lists.
- ``structural_tag``: a JSON object with ``triggers``, a list of texts, and ``structures``, a list of objects. A structure has
  ``begin`` (a text that begins with a trigger), ``schema`` (of the JSON value after it) and ``end`` (the text after the value).
  The output is unrestricted, special tokens included, until a trigger. From the trigger on it is one of the structures that
  begin with it, and it is unrestricted again after that. It may end only outside of structures. As in ``tool_calls``, a tag
  that is a token appears as that token; but a trigger also counts if several tokens spell it.
"""


CallPart = str | dict[str, Any]
"""Part of a call of the kind ``tool_calls``; see `GrammarKind`."""

WHITESPACE = "x-whitespace"
"""Member of a schema: a pattern of the whitespace between JSON tokens, empty for no whitespace.

Without it, only one space after a comma or a colon is allowed. It applies to a whole schema, also in ``tool_calls`` and
``structural_tag``.
"""

MAX_GRAMMAR_BYTES: dict[GrammarKind, int] = {
    "json_object": 0,
    "json_schema": 256 * 1024,
    "regex": 64 * 1024,
    "choice": 256 * 1024,
    "grammar": 64 * 1024,
    "tool_calls": 256 * 1024,
    "structural_tag": 256 * 1024,
}
"""Maximum size of a text by kind, in bytes of UTF-8."""


def check_grammar_size(kind: GrammarKind, text: str, name: str) -> None:
    """Check that a text is not longer than `MAX_GRAMMAR_BYTES`.

    Raises:
        InvalidValueError: it is longer. The message has `name` and the limit.
    """
    limit = MAX_GRAMMAR_BYTES[kind]
    try:
        # A text has at least as many bytes as characters, so a very long one need not be encoded.
        size = len(text) if len(text) > limit else len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidValueError(name, text, f"valid Unicode ({error.reason})") from None
    if size > limit:
        raise InvalidValueError(
            name, Summary(f"{size} bytes"), f"at most {limit} bytes long", "Ask for a smaller structure."
        )


def mask_width(vocab_size: int) -> int:
    """Return the number of words of a mask, W."""
    return -(-vocab_size // 32)


def clear_tokens(mask: Masks, token_ids: Collection[int]) -> None:
    """Ban tokens in a mask [W]."""
    words = mask.view(np.uint32)
    if len(token_ids) < _MANY_TOKENS:
        for token in token_ids:
            words[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
        return
    tokens = np.fromiter(token_ids, np.uint32, len(token_ids))
    np.bitwise_and.at(words, tokens // 32, ~(np.uint32(1) << tokens % 32))


def allow_token(mask: Masks, token_id: int) -> None:
    """Allow a token in a mask [W]."""
    mask.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)


class GrammarState(ABC):
    """State of one output in a grammar."""

    @abstractmethod
    def fill_mask(self, mask: Masks) -> None:
        """Overwrite `mask` [W] with the tokens that may come next.

        EOS tokens are allowed if `is_complete`. At least one token is always allowed.
        """

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Advance by one token. Return False, without a change, if the grammar does not allow it.

        After the end, further EOS tokens are accepted.
        """

    @abstractmethod
    def copy(self) -> Self:
        """Return an independent copy of this state. Other threads may use other copies at the same time."""

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """True if the output may end here."""

    @property
    @abstractmethod
    def is_finished(self) -> bool:
        """True if only the end may follow."""

    @property
    def error(self) -> str:
        """Limit that the state exceeded, as a sentence; empty if there is none. If it is set, `is_finished` is True."""
        return ""


class GrammarBackend(ABC):
    """Grammar backend: it compiles grammars for one tokenizer. A compiled grammar is a `GrammarState`."""

    plugin_api: ClassVar[str] = ">=2,<3"

    @abstractmethod
    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Read the tokenizer.

        Args:
            tokenizer: a transformers tokenizer.
            vocab_size: width of the model's logits, V.
            eos_token_ids: EOS tokens of the model.

        Raises:
            MinisglError: the tokens of the tokenizer cannot be read.
        """

    @staticmethod
    @abstractmethod
    def check(kind: GrammarKind, text: str, name: str) -> None:
        """Check a text without a tokenizer, which finds most errors.

        The engine calls it in a separate process with limits of 0.5 s of CPU time and 128 MiB of memory. A text that passes is
        compiled in the engine's process. So `check` must do the expensive work of `compile`, and no later step may be more
        expensive. `GrammarState.fill_mask` and `GrammarState.accept` must take at most some tens of milliseconds for any text and
        output. They set `GrammarState.error` if they would need more.

        Args:
            kind: kind of `text`.
            text: see `GrammarKind`.
            name: the user's name for the text, for the error.

        Raises:
            InvalidValueError: `text` is not valid for its kind, or no output matches it. The message has the reason.
        """

    @abstractmethod
    def compile(self, kind: GrammarKind, text: str, name: str) -> GrammarState:
        """Compile a grammar and return its initial state. Several threads call this.

        Raises:
            InvalidValueError: see `check`.
        """

    def fill_masks(self, states: Sequence[GrammarState], masks: Masks) -> None:
        """Fill the masks [len(states), W] of several states, which come from `compile` or `GrammarState.copy`."""
        for state, mask in zip(states, masks, strict=True):
            state.fill_mask(mask)
