"""The seam for grammars: which tokens a structured output allows next.

Masks are packed: bit ``t % 32`` of word ``t // 32`` is set where token ``t`` may come next. Shape legend: V vocabulary,
W = ceil(V / 32) words.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt

from minisgl_core.errors import InvalidValueError

Masks = npt.NDArray[np.int32]

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "tagged_json", "structural_tag"]
"""What the text of a grammar is:

- ``json_object``: empty; any JSON object.
- ``json_schema``: a JSON schema. Its member ``x-whitespace`` (`WHITESPACE`) says which whitespace the output may have.
- ``regex``: a pattern that the whole output matches.
- ``choice``: a JSON list of texts, one of which the output is.
- ``grammar``: a context-free grammar, in Lark's notation and beginning at ``start``, or as EBNF, whose rules have ``::=``, and
  beginning at ``root``.
- ``tagged_json``: a JSON object of ``prefix``, ``schema``, ``suffix``, ``separator`` (texts but for the schema) and
  ``max_items`` (a number or null): one or more JSON values, each between prefix and suffix. ``otherwise``, where it is not
  null, is a schema of what the output may be instead. A tag such as ``<tool_call>`` is the token of that name, if any.
- ``structural_tag``: a JSON object of ``triggers``, a list of texts, and ``structures``, a list of objects of ``begin`` (a text
  that begins with a trigger), ``schema`` (what the JSON value after it fits) and ``end`` (the text after that). The output is
  free, special tokens included, but from each trigger on it is one of the structures that begin with it, and free again after
  it. It may end only outside of them. Tags are tokens as above; spelled out in text, a trigger holds just as well.
"""


WHITESPACE = "x-whitespace"
"""Member of a schema: a pattern that the whitespace between the parts of the JSON matches, empty for none.

Without it, a comma and a colon may have one space behind them, and nothing else may have any. It holds for a schema as a
whole, in ``tagged_json`` and ``structural_tag`` too.
"""

MAX_GRAMMAR_BYTES: dict[GrammarKind, int] = {
    "json_object": 0,
    "json_schema": 256 * 1024,
    "regex": 64 * 1024,
    "choice": 256 * 1024,
    "grammar": 64 * 1024,
    "tagged_json": 256 * 1024,
    "structural_tag": 256 * 1024,
}
"""Longest texts that a provider gets, in UTF-8."""


def check_grammar_size(kind: GrammarKind, text: str, name: str) -> None:
    """Refuse a text that is longer than `MAX_GRAMMAR_BYTES`.

    Raises:
        InvalidValueError: it is; names `name` and the limit.
    """
    limit = MAX_GRAMMAR_BYTES[kind]
    try:
        size = len(text) if len(text) > limit else len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidValueError(name, text, f"valid Unicode ({error.reason})") from None
    if size > limit:
        raise InvalidValueError(name, f"{size} bytes", f"at most {limit} bytes long", "Ask for a smaller structure.")


def mask_width(vocab_size: int) -> int:
    """W: words in a mask."""
    return -(-vocab_size // 32)


def clear_tokens(mask: Masks, token_ids: Iterable[int]) -> None:
    """Forbid tokens in a mask [W]."""
    words = mask.view(np.uint32)
    for token in token_ids:
        words[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)


def allow_token(mask: Masks, token_id: int) -> None:
    """Allow a token in a mask [W]."""
    mask.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)


class GrammarState(ABC):
    """One output's progress through a grammar."""

    @abstractmethod
    def fill_mask(self, mask: Masks) -> None:
        """Write which tokens may come next into `mask` [W], all of it.

        The end-of-sequence tokens are among them where `is_complete`. At least one token always is.
        """

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Advance by one token; False where the grammar does not allow it (and the state is unchanged).

        After the end, more end-of-sequence tokens are accepted.
        """

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens."""

    @abstractmethod
    def copy(self) -> Self:
        """A state at the same place that goes its own way. May be called while another copy is at work in another thread."""

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Whether the output may end here."""

    @property
    @abstractmethod
    def is_finished(self) -> bool:
        """Whether nothing but the end may follow."""

    @property
    def error(self) -> str:
        """Why the state cannot go on, where it exceeded a bound on the way; empty for none. It is finished then."""
        return ""


class Grammar(ABC):
    """Compiles structured-output requests for one tokenizer."""

    plugin_api: ClassVar[str] = ">=2,<3"

    @abstractmethod
    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`tokenizer`: a transformers tokenizer; `vocab_size`: width of the model's logits, V.

        Raises:
            MinisglError: the tokenizer's tokens cannot be read.
        """

    @staticmethod
    @abstractmethod
    def check(kind: GrammarKind, text: str, name: str) -> None:
        """Find most faults of a text without a tokenizer.

        The engine calls it in a process of its own, which has half a second of processor time and 128 MiB of memory for it.
        A text that passes is compiled in the engine's process. So `check` must do what is expensive in `compile`, and nothing
        that comes after it may be more expensive: `GrammarState.fill_mask` and `GrammarState.accept` take at most some tens of
        milliseconds for any text and any output, and set `GrammarState.error` where they would need more.

        Args:
            kind: what `text` is.
            text: see `GrammarKind`.
            name: what the user calls the text, for the error.

        Raises:
            InvalidValueError: `text` is not valid for its kind, or no output fits it; says why.
        """

    @abstractmethod
    def compile(self, kind: GrammarKind, text: str, name: str) -> GrammarState:
        """The state at the beginning of an output. Called from several threads.

        Raises:
            InvalidValueError: see `check`.
        """

    def fill_masks(self, states: Sequence[GrammarState], masks: Masks) -> None:
        """`GrammarState.fill_mask` of several states, which `compile` or a copy gave, at once; `masks`: [len(states), W]."""
        for state, mask in zip(states, masks, strict=True):
            state.fill_mask(mask)
