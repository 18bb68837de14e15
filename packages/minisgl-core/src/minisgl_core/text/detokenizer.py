"""Incremental detokenization."""

import codecs
from collections.abc import Callable, Sequence
from typing import NamedTuple

from minisgl_core.sampling_params import SamplingParams
from minisgl_core.text.stop import StopFinder
from minisgl_core.text.tokens import TokenBytes

REPLACEMENT = "\ufffd"
"""Replacement character, which decoders return for bytes that do not form a complete character."""
MAX_CHAR_BYTES = 4
"""Maximum number of bytes of a character in UTF-8."""
MAX_WINDOW = 64
"""Maximum number of tokens that are decoded again with the new ones."""
KEPT_WINDOW = 16
"""Tokens that are kept as context once there are more than `MAX_WINDOW`."""


class IncrementalDetokenizer:
    """Incremental detokenizer of one request, in constant time per token.

    The joined pieces equal the text of all tokens decoded at once, without transformers' clean-up of spaces. For byte-level
    tokenizers this holds for all tokens, and for others if the bytes form valid UTF-8. No piece ends inside a character: a
    token that ends inside one is held back until the character is complete.

    The text of the first `min_tokens` tokens is not searched for stop strings.
    """

    def __init__(self, tokens: TokenBytes, sampling: SamplingParams) -> None:
        kind = _ByteDecoder if tokens.is_byte_level else _WindowDecoder
        self._decode: Callable[[Sequence[int], bool], str] = kind(tokens, sampling.skip_special_tokens).decode
        self._stop = StopFinder(sampling.stop, sampling.include_stop_str_in_output)
        self._num_unsearched = sampling.min_tokens if sampling.stop else 0

    def push(self, token_ids: Sequence[int], finished: bool) -> tuple[str, str | None]:
        """Add tokens, the last ones if `finished`, so that nothing is held back.

        Returns:
            New text, and the stop string that was found, or None. The text ends before the stop string, or with it if stops are
            included, and the detokenizer is done then.
        """
        unsearched = ""
        if count := min(self._num_unsearched, len(token_ids)):
            self._num_unsearched -= count
            unsearched, token_ids = self._decode(token_ids[:count], False), token_ids[count:]
        text, stop = self._stop.push(self._decode(token_ids, finished))
        text = unsearched + text
        if finished and stop is None:
            text += self._stop.finish()
        return text, stop


class _ByteDecoder:
    """Decoder of the tokens' bytes, for byte-level tokenizers."""

    def __init__(self, tokens: TokenBytes, skip_special_tokens: bool) -> None:
        self._tokens = tokens
        self._skipped = tokens.special_ids if skip_special_tokens else frozenset()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def decode(self, token_ids: Sequence[int], finished: bool) -> str:
        """See `IncrementalDetokenizer.push`."""
        tokens = self._tokens
        return self._decode(b"".join([tokens[each] for each in token_ids if each not in self._skipped]), finished)


class _WindowDecoder:
    """Decoder for other tokenizers. It decodes the tokens of the last text that it returned, as context, with the new tokens.

    A decoder may treat the first token of a text differently: that of sentencepiece drops its leading space. A decoder with
    byte fallback decodes a run of byte tokens as a whole. With an incomplete character at its end, the complete characters
    before it become replacement characters, too.
    """

    def __init__(self, tokens: TokenBytes, skip_special_tokens: bool) -> None:
        self._tokenizer = tokens.tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._special = tokens.special_ids if skip_special_tokens else frozenset()
        self._ids: list[int] = []
        self._num_context = 0
        """Tokens of `_ids` before the last known character boundary."""
        self._num_shown = 0
        """Characters of `_ids`' text that were returned already."""

    def decode(self, token_ids: Sequence[int], finished: bool) -> str:
        """See `IncrementalDetokenizer.push`."""
        new = [token for token in token_ids if token not in self._special]
        if finished:
            return self._add(new, finished)
        # Tokens are added one by one: this finds the boundary before a character that is spread over several tokens.
        return "".join([self._add([token], finished) for token in new])

    def _add(self, token_ids: list[int], finished: bool) -> str:
        self._ids += token_ids
        text = self._text(self._ids)
        end = len(text)
        if text.endswith(REPLACEMENT) and not finished:
            if len(self._ids) - self._num_context < MAX_CHAR_BYTES:
                return ""
            # This many tokens complete any character, so some bytes are invalid. The last few may still become a character.
            end -= min(MAX_CHAR_BYTES - 1, end - len(text.rstrip(REPLACEMENT)))
        shown = text[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        if shown and end == len(text):  # a character boundary: these tokens become the context of the next ones
            self._ids = self._ids[self._num_context :]
            self._num_context = len(self._ids)
            self._num_shown = len(self._text(self._ids))
        elif len(self._ids) > MAX_WINDOW:  # a long run without a boundary
            num_waiting = len(text) - self._num_shown
            self._ids = self._ids[-KEPT_WINDOW:]
            self._num_context = 0
            # The characters that were not returned yet are at the end of the text.
            self._num_shown = max(0, len(self._text(self._ids)) - num_waiting)
        return shown

    def _text(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


class Piece(NamedTuple):
    """New text of a request's output.

    Attributes:
        text: new text.
        finish_reason: ``stop``, ``length``, ``abort``, or None while running.
        stop_reason: the stop string or token that ended it; None for an EOS token or a limit.
        needs_abort: True if a stop string ended it, so that the scheduler still runs the request and has to abort it.
    """

    text: str
    finish_reason: str | None
    stop_reason: str | int | None
    needs_abort: bool


class OutputText:
    """Text of one request's output, from the scheduler's messages. It is empty if `tokens` is None."""

    def __init__(self, tokens: TokenBytes | None, sampling: SamplingParams) -> None:
        self._detokenizer = None if tokens is None else IncrementalDetokenizer(tokens, sampling)
        self._stop_token_ids = sampling.stop_token_ids
        self._include_stop = sampling.include_stop_str_in_output

    def push(
        self, token_ids: Sequence[int], finish_reason: str | None = None, stop_token_id: int | None = None
    ) -> Piece:
        """Add new tokens; see `TokenOut`. The text leaves out a token that ended the output, unless the request includes it."""
        finished = finish_reason is not None
        if stop_token_id is not None and not self._include_stop:
            token_ids = token_ids[:-1]
        text, stop = self._detokenizer.push(token_ids, finished) if self._detokenizer else ("", None)
        if stop is not None:
            return Piece(text, "stop", stop, needs_abort=not finished)
        stop_reason = stop_token_id if stop_token_id in self._stop_token_ids else None
        return Piece(text, finish_reason, stop_reason, needs_abort=False)
