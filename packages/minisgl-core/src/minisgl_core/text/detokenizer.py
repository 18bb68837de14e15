"""Text from tokens, as they come."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import NamedTuple

from minisgl_core.messages import TokenOut
from minisgl_core.sampling_params import SamplingParams
from minisgl_core.text.stop import StopFinder
from minisgl_core.text.tokens import TokenBytes

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
    the middle of one waits for those that complete it.

    Args:
        tokens: of the tokenizer.
        skip_special_tokens: leave special tokens out.
        stop: texts that end the output.
        min_tokens: the text of so many tokens ends nothing.
        include_stop: the text that ends the output is part of it.
    """

    def __init__(
        self,
        tokens: TokenBytes,
        skip_special_tokens: bool = True,
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        kind = _Bytes if tokens.make_up_texts else _Window
        self._decode: Callable[[Sequence[int], bool], str] = kind(tokens, skip_special_tokens).decode
        self._stop = StopFinder(stop, include_stop)
        self._num_free = min_tokens if stop else 0

    def push(self, token_ids: Sequence[int], finished: bool) -> tuple[str, str | None]:
        """Add tokens.

        Args:
            token_ids: new tokens, any number.
            finished: no more will come: nothing is held back.

        Returns:
            New text, and the stop text that ends the output, if one was found: the text then ends before it, or with it
            where stops are included, and the detokenizer is done.
        """
        free = ""
        if num_free := min(self._num_free, len(token_ids)):
            self._num_free -= num_free
            free, token_ids = self._decode(token_ids[:num_free], False), token_ids[num_free:]
        text, stop = self._stop.push(self._decode(token_ids, finished))
        text = free + text
        if finished and stop is None:
            text += self._stop.finish()
        return text, stop


class _Bytes:
    """Decodes the tokens' bytes."""

    def __init__(self, tokens: TokenBytes, skip_special_tokens: bool) -> None:
        self._tokens = tokens
        self._skipped = tokens.special_ids if skip_special_tokens else frozenset()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def decode(self, token_ids: Sequence[int], finished: bool) -> str:
        """See `IncrementalDetokenizer.push`."""
        tokens = self._tokens
        return self._decode(b"".join([tokens[each] for each in token_ids if each not in self._skipped]), finished)


class _Window:
    """Has the tokenizer decode the new tokens together with those of the step before.

    A decoder may treat the first token of a text differently: sentencepiece's drops its leading space. And one with byte
    fallback decodes a run of byte tokens as a whole: the first byte of a character makes those before it invalid, too.
    """

    def __init__(self, tokens: TokenBytes, skip_special_tokens: bool) -> None:
        self._tokenizer = tokens.tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._special = tokens.special_ids if skip_special_tokens else frozenset()
        self._ids: list[int] = []
        self._num_context = 0
        """Tokens of `_ids` up to the last place known to lie between two characters."""
        self._num_shown = 0
        """Characters of `_ids`' text that were returned."""

    def decode(self, token_ids: Sequence[int], finished: bool) -> str:
        """See `IncrementalDetokenizer.push`."""
        new = [token for token in token_ids if token not in self._special]
        if finished:
            return self._add(new, finished)
        # One by one: where several end inside a character, only so is the place before it known.
        return "".join([self._add([token], finished) for token in new])

    def _add(self, token_ids: list[int], finished: bool) -> str:
        self._ids += token_ids
        text = self._text(self._ids)
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
            self._num_shown = len(self._text(self._ids))
        elif len(self._ids) > MAX_WINDOW:
            num_waiting = len(text) - self._num_shown
            self._ids = self._ids[-KEPT_WINDOW:]
            self._num_context = 0
            self._num_shown = max(0, len(self._text(self._ids)) - num_waiting)
        return shown

    def _text(self, token_ids: list[int]) -> str:
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
    """Text of one request, from what the scheduler sends of it; empty where no `tokens` are known."""

    def __init__(self, tokens: TokenBytes | None, sampling: SamplingParams) -> None:
        self._detokenizer = None
        if tokens is not None:
            self._detokenizer = IncrementalDetokenizer(
                tokens,
                sampling.skip_special_tokens,
                sampling.stop,
                sampling.min_tokens,
                sampling.include_stop_str_in_output,
            )
        self._stop_token_ids = sampling.stop_token_ids
        self._include_stop = sampling.include_stop_str_in_output

    def push(self, out: TokenOut) -> Piece:
        """Add new tokens. A token that ended the output is not part of its text, unless the request includes it."""
        finished = out.finish_reason is not None
        leaves_out_last = out.stop_token_id is not None and not self._include_stop
        token_ids = out.token_ids[:-1] if leaves_out_last else out.token_ids
        text, stop = self._detokenizer.push(token_ids, finished) if self._detokenizer else ("", None)
        if stop is not None:
            return Piece(text, "stop", stop, is_early=not finished)
        stop_reason = out.stop_token_id if out.stop_token_id in self._stop_token_ids else None
        return Piece(text, out.finish_reason, stop_reason, is_early=False)
