"""Log-probabilities in the forms of OpenAI's two APIs."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from typing import Any

from minisgl_core.messages import Logprob, Text, TokenLogprobs

LEAST = -9999.0
"""What OpenAI writes for a token that cannot occur; JSON has no infinity."""


def chat_logprobs(text: Text) -> dict[str, Any] | None:
    """``choices[].logprobs`` of a chat, for new text."""
    if text.logprobs is None:
        return None
    content = [
        _chat_entry(place.token, text.token_bytes)
        | {"top_logprobs": [_chat_entry(entry, text.token_bytes) for entry in place.top]}
        for place in text.logprobs
    ]
    return {"content": content, "refusal": None}


def _chat_entry(entry: Logprob, token_bytes: Mapping[int, bytes]) -> dict[str, Any]:
    data = token_bytes[entry.token_id]
    return {"token": data.decode(errors="replace"), "logprob": max(entry.logprob, LEAST), "bytes": list(data)}


class CompletionLogprobs:
    """``choices[].logprobs`` of one completion, piece by piece: keeps where in the text the next token begins.

    Args:
        skips_special: the output's text leaves special tokens out.
    """

    def __init__(self, skips_special: bool) -> None:
        self._skips_special = skips_special
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._offset = 0

    def push(self, text: Text) -> dict[str, Any] | None:
        """The part about new text, the echoed prompt's tokens first."""
        result: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if text.prompt_logprobs is not None and text.prompt_token_ids is not None:
            for token_id, prompt_place in zip(text.prompt_token_ids, text.prompt_logprobs, strict=True):
                token = text.token_bytes[token_id]
                is_shown = token_id not in text.special_ids or self._is_next(token, text)
                is_first = is_shown and self._offset == 0
                self._add(result, token_id, prompt_place, text.token_bytes, is_shown)
                if is_first and token.startswith(b" ") and not (text.prompt_text or "").startswith(" "):
                    self._offset -= 1  # some tokenizers put a space before a text, and take it away again
        elif text.logprobs is None:
            return None
        for place in text.logprobs or ():
            token_id = place.token.token_id
            is_shown = not self._skips_special or token_id not in text.special_ids
            self._add(result, token_id, place, text.token_bytes, is_shown)
        return result

    def _is_next(self, token: bytes, text: Text) -> bool:
        """Whether a special token of the prompt is part of its text: one that the tokenizer adds, or decoding skips, is not."""
        return (text.prompt_text or "").startswith(token.decode(), self._offset)

    def _add(
        self,
        result: dict[str, Any],
        token_id: int,
        place: TokenLogprobs | None,
        token_bytes: Mapping[int, bytes],
        is_shown: bool,
    ) -> None:
        result["tokens"].append(_token_text(token_bytes[token_id]))
        result["text_offset"].append(self._offset)
        result["token_logprobs"].append(None if place is None else max(place.token.logprob, LEAST))
        result["top_logprobs"].append(None if place is None else _top(place, token_bytes))
        if is_shown:
            self._offset += len(self._decode(token_bytes[token_id]))


def _top(place: TokenLogprobs, token_bytes: Mapping[int, bytes]) -> dict[str, float]:
    """The most likely tokens and the one that stands there."""
    return {_token_text(token_bytes[e.token_id]): max(e.logprob, LEAST) for e in (place.token, *place.top)}


def _token_text(data: bytes) -> str:
    """As text; what is no text, as OpenAI writes it, so that different tokens stay different keys."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
