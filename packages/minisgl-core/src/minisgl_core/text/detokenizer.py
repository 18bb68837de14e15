"""Text from tokens, as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from minisgl_core.messages import TokenOut
from minisgl_core.sampling_params import SamplingParams
from minisgl_core.text.stop import StopFinder

REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are not (yet) a character."""
MAX_CHAR_BYTES = 4
MAX_WINDOW = 64
"""Tokens looked at, at most, besides those just pushed."""
KEPT_WINDOW = 16


class IncrementalDetokenizer:
    """Decodes one request's tokens piece by piece, in constant time a token.

    The pieces joined are the text of all tokens decoded at once (without the spaces' "clean-up"), for byte-level tokenizers
    whatever the tokens, for others where the bytes form valid UTF-8. No piece ends inside a character: a token that ends in
    the middle of one waits for those that complete it. Each step decodes the new tokens together with those of the step
    before, because a decoder may treat the first token of a text differently (sentencepiece drops its leading space).

    Args:
        tokenizer: a transformers tokenizer.
        skip_special_tokens: leave special tokens out.
        stop: texts that end the output.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._special = _special_ids(tokenizer) if skip_special_tokens else frozenset()
        self._stop = StopFinder(stop)
        self._ids: list[int] = []
        self._num_context = 0
        """Tokens of `_ids` up to the last place known to lie between two characters."""
        self._num_shown = 0
        """Characters of `_ids`' text that were returned."""

    def push(self, token_ids: Sequence[int], finished: bool) -> tuple[str, str | None]:
        """Add tokens.

        Args:
            token_ids: new tokens, any number.
            finished: no more will come: nothing is held back.

        Returns:
            New text, and the stop text that ends the output, if one was found: the text then ends before it and the
            detokenizer is done.
        """
        text, stop = self._stop.push(self._decode_new(token_ids, finished))
        if finished and stop is None:
            text += self._stop.finish()
        return text, stop

    def _decode_new(self, token_ids: Sequence[int], finished: bool) -> str:
        self._ids += [token for token in token_ids if token not in self._special]
        text = self._decode(self._ids)
        end = len(text)
        if text.endswith(REPLACEMENT) and not finished:
            if len(self._ids) - self._num_context < MAX_CHAR_BYTES:
                return ""
            # So many tokens complete any character, so some bytes are invalid; the last few may still become one.
            end -= min(MAX_CHAR_BYTES - 1, end - len(text.rstrip(REPLACEMENT)))
        shown = text[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        if shown and end == len(text):
            self._ids = self._ids[self._num_context :]
            self._num_context = len(self._ids)
            self._num_shown = len(self._decode(self._ids))
        elif len(self._ids) > MAX_WINDOW:
            num_waiting = len(text) - self._num_shown
            self._ids = self._ids[-KEPT_WINDOW:]
            self._num_context = 0
            self._num_shown = max(0, len(self._decode(self._ids)) - num_waiting)
        return shown

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


class Piece(NamedTuple):
    """New output of a request, in text.

    Attributes:
        text: new text.
        finish_reason: ``stop``, ``length``, ``abort``, or None while running.
        stop_reason: the stop text or token that ended it; None for the model's own end or a limit.
        is_early: a stop text ended it before the scheduler knew: the scheduler must be told to abort it.
    """

    text: str
    finish_reason: str | None
    stop_reason: str | int | None
    is_early: bool


class OutputText:
    """Text of one request, from what the scheduler sends of it."""

    def __init__(self, tokenizer: Any, sampling: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, sampling.skip_special_tokens, sampling.stop)
        self._stop_token_ids = sampling.stop_token_ids

    def push(self, out: TokenOut) -> Piece:
        """Add new tokens. A token that ended the output is not part of its text."""
        finished = out.finish_reason is not None
        token_ids = out.token_ids if out.stop_token_id is None else out.token_ids[:-1]
        text, stop = self._detokenizer.push(token_ids, finished)
        if stop is not None:
            return Piece(text, "stop", stop, is_early=not finished)
        stop_reason = out.stop_token_id if out.stop_token_id in self._stop_token_ids else None
        return Piece(text, out.finish_reason, stop_reason, is_early=False)


def _special_ids(tokenizer: Any) -> frozenset[int]:
    """Tokens that decoding leaves out."""
    return frozenset(index for index, token in tokenizer.added_tokens_decoder.items() if token.special)
