"""Constrained decoding by llguidance (https://github.com/guidance-ai/llguidance), an Earley parser over a token trie."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import llguidance
import numpy as np

from minisgl_backends.grammar import lark
from minisgl_core.contracts.grammar import GrammarBackend, GrammarKind, GrammarState, Masks, clear_tokens, mask_width
from minisgl_core.contracts.structured_outputs import StructuralTag
from minisgl_core.errors import InvalidValueError, ModelFormatError

_LIMITS = llguidance.LLParserLimits(
    step_lexer_fuel=50_000,
    step_max_items=5_000,
    max_lexer_states=50_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
"""Limits of about 10 ms per mask and 30 MB per state. The cost of compiling does not depend on the vocabulary."""


_RECOMPILE_LIMIT_S = 0.02
"""CPU time of compiling up to which a grammar is compiled again in the middle of an output."""
_RECOMPILE_INTERVAL = 1000
"""Minimum number of tokens of an output between two such compilations; a quarter of the output if that is more."""
_cached_tokenizer = cache(llguidance.LLTokenizer)
"""Makes a tokenizer by its name, once, as that takes longer than to compile a small grammar."""


@dataclass(slots=True)
class _SharedLexer:
    """Lexer that new outputs of a grammar share.

    Attributes:
        matcher: the initial matcher that has the lexer.
        source: the grammar in llguidance's notation; None if compiling it again would take too long.
    """

    matcher: llguidance.LLMatcher
    source: str | None


class LlguidanceState(GrammarState):
    """A matcher, and the tokens that it has accepted.

    The outputs of a grammar share a lexer, whose number of states only grows. When it has too many, they go on with new lexers.
    """

    __slots__ = ("_grammar", "_next_recompilation", "_shared", "_token_ids", "matcher")

    def __init__(self, grammar: "LlguidanceGrammar", matcher: llguidance.LLMatcher, shared: _SharedLexer) -> None:
        self._grammar, self.matcher, self._shared = grammar, matcher, shared
        self._token_ids: list[int] = []
        self._next_recompilation = 0

    def fill_mask(self, mask: Masks) -> None:
        width = self._grammar.matcher_width
        wide = np.zeros(width, np.int32) if width else mask
        self.matcher.unsafe_compute_mask_ptr(wide.ctypes.data, wide.nbytes)
        if self._recompile():
            self.matcher.unsafe_compute_mask_ptr(wide.ctypes.data, wide.nbytes)
        if width:
            mask[:] = wide[: len(mask)]
            clear_tokens(mask, range(self._grammar.vocab_size, 32 * len(mask)))

    def accept(self, token_id: int) -> bool:
        if self.matcher.is_stopped() and not self.matcher.is_error():
            return token_id in self._grammar.eos_token_ids
        is_accepted: bool = self.matcher.try_consume_tokens([token_id]) == 1
        if not is_accepted:
            self.matcher.compute_bitmask()  # it reports the error of a lexer that another output has used up
            is_accepted = self._recompile() and self.matcher.try_consume_tokens([token_id]) == 1
        if is_accepted:
            self._token_ids.append(token_id)
        return is_accepted

    def _recompile(self) -> bool:
        """After an error of the matcher, replace it by one with a lexer of its own. Return True if that was done."""
        source, num_tokens = self._shared.source, len(self._token_ids)
        if not self.matcher.is_error() or source is None or num_tokens < self._next_recompilation:
            return False
        self._next_recompilation = num_tokens + max(_RECOMPILE_INTERVAL, num_tokens // 4)
        start = self._grammar.new_matcher(source)
        matcher = start.deep_copy()
        if matcher.try_consume_tokens(self._token_ids) != num_tokens:
            return False
        self.matcher, self._shared.matcher = matcher, start
        return True

    def copy(self) -> "LlguidanceState":
        matcher = self.matcher if self._token_ids else self._shared.matcher
        state = LlguidanceState(self._grammar, matcher.deep_copy(), self._shared)
        state._token_ids = self._token_ids.copy()
        return state

    @property
    def is_complete(self) -> bool:
        return self.matcher.is_accepting()

    @property
    def is_finished(self) -> bool:
        return self.matcher.is_stopped()

    @property
    def error(self) -> str:
        return _summary(self.matcher.get_error()) if self.matcher.is_error() else ""


class LlguidanceGrammar(GrammarBackend):
    """Grammar backend by llguidance. Compiling takes milliseconds, a mask takes microseconds. Masks are filled in parallel."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        from llguidance.hf import from_tokenizer  # it imports transformers, which `check` does not need

        self.vocab_size, self.eos_token_ids = vocab_size, frozenset(eos_token_ids)
        num_matcher_tokens = max(vocab_size, len(tokenizer))
        self.matcher_width = 0 if num_matcher_tokens == vocab_size else mask_width(num_matcher_tokens)
        """Words of a matcher's mask if the tokenizer has more tokens than the model, else 0."""
        try:
            self._tokenizer = from_tokenizer(tokenizer, n_vocab=num_matcher_tokens, eos_token=list(eos_token_ids))
        except Exception as error:  # its exceptions have no common base class
            raise ModelFormatError(f"llguidance cannot read the model's tokenizer: {_summary(str(error))}") from error
        added = tokenizer.added_tokens_decoder.items()
        self._special = {
            token.content: token_id for token_id, token in added if self._tokenizer.is_special_token(token_id)
        }
        self._non_eos = {
            text: token_id for text, token_id in self._special.items() if token_id not in self.eos_token_ids
        }
        self._executor: llguidance.LLExecutor | None = None

    @staticmethod
    def check(kind: GrammarKind, text: str, name: str) -> None:
        """See `GrammarBackend.check`. Keywords of a schema that llguidance does not support are errors.

        The tokens are single bytes here: compiling costs the same as with the model's tokens; see `_LIMITS`.
        """
        source = _source(kind, text, name, {}, {})
        if kind == "grammar":
            source = lark.without_tokens(source)
        _matcher(_cached_tokenizer("byte"), source, kind, text, name)

    def compile(self, kind: GrammarKind, text: str, name: str) -> LlguidanceState:
        before = time.thread_time()
        source = _source(kind, text, name, self._special, self._non_eos)
        matcher = _matcher(self._tokenizer, source, kind, text, name)
        is_quick = time.thread_time() - before < _RECOMPILE_LIMIT_S
        return LlguidanceState(self, matcher, _SharedLexer(matcher.deep_copy(), source if is_quick else None))

    def new_matcher(self, source: str) -> llguidance.LLMatcher:
        """Return a matcher of a source that `compile` has translated."""
        return _new_matcher(self._tokenizer, source)

    def fill_masks(self, states: Sequence[GrammarState], masks: Masks) -> None:
        if self.matcher_width or len(states) < 2:
            super().fill_masks(states, masks)
            return
        self._executor = self._executor or llguidance.LLExecutor()
        matchers = [(cast(LlguidanceState, state).matcher, index) for index, state in enumerate(states)]
        self._executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, masks.strides[0], len(masks))
        for state, mask in zip(states, masks, strict=True):
            if state.error:
                state.fill_mask(mask)


def _source(kind: GrammarKind, text: str, name: str, special: lark.SpecialTokens, non_eos: lark.SpecialTokens) -> str:
    """Return the grammar in llguidance's notation; `non_eos` has the special tokens without EOS tokens."""
    try:
        return _translate(kind, text, special, non_eos)
    except RecursionError:
        raise _refusal(kind, text, name, "it is nested too deeply") from None
    except ValueError as error:
        raise _refusal(kind, text, name, str(error)) from None


def _translate(kind: GrammarKind, text: str, special: lark.SpecialTokens, non_eos: lark.SpecialTokens) -> str:
    match kind:
        case "json_object":
            return lark.json_value({"type": "object"})
        case "json_schema":
            return lark.json_value(_json(text))
        case "regex":
            return lark.regex(text)
        case "choice":
            # A terminal, since a rule may have at most 2,000 alternatives.
            return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(each) for each in _json(text))
        case "grammar":
            return lark.from_grammar(text, special)
        case "tool_calls":
            return lark.tool_calls(_json(text), non_eos)
        case "structural_tag":
            return lark.structural_tag(StructuralTag.read(text), non_eos)


def _matcher(
    tokenizer: llguidance.LLTokenizer, source: str, kind: GrammarKind, text: str, name: str
) -> llguidance.LLMatcher:
    """Return a matcher. A copy of it computes a first mask, to find grammars that allow nothing."""
    matcher = _new_matcher(tokenizer, source)
    first = matcher.deep_copy()
    if not first.is_error():
        first.compute_bitmask()
    if first.is_error():
        raise _refusal(kind, text, name, first.get_error())
    return matcher


def _new_matcher(tokenizer: llguidance.LLTokenizer, source: str) -> llguidance.LLMatcher:
    source = llguidance.LLMatcher.grammar_from_lark(source + lark.NO_FORCING)
    return llguidance.LLMatcher(tokenizer, source, log_level=0, limits=_LIMITS)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from None


def _refusal(kind: str, text: str, name: str, reason: str) -> InvalidValueError:
    wanted = {
        "json_schema": "a JSON schema",
        "regex": "a regular expression",
        "choice": "a list of texts",
        "grammar": "a grammar in Lark's notation or EBNF",
        "structural_tag": "a structural tag",
    }
    return InvalidValueError(
        name, text, f"{wanted.get(kind, kind)} that llguidance supports", f"Reason: {_summary(reason)}"
    )


def _summary(text: str) -> str:
    if text.startswith("NoExtension"):  # llguidance's name of the error
        return "no text fits it"
    if "oneOf constraints are not supported" in text:  # llguidance advises an option that requests do not have
        return "oneOf is supported only if its alternatives exclude each other; use anyOf"
    _, _, text = text.rpartition("failed to compile JSON schema: ")  # before it is a position in the text of `lark`
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = [line for line in lines if line.startswith("error:")]
    return " ".join(dict.fromkeys([*lines[:1], *found[:1]]))[:500]
