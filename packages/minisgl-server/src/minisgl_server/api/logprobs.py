"""Log-probabilities in the forms of OpenAI's two APIs."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from typing import Any

from minisgl_core.messages import Logprob, Text, TokenLogprobs
from minisgl_core.sampling_params import MAX_LOGPROBS
from minisgl_server.api.schemas import GenerationRequest

LEAST = -9999.0
"""What OpenAI writes for a token that cannot occur; JSON has no infinity."""


def about_prompt(request: GenerationRequest, text: Text) -> dict[str, Any]:
    """Return the prompt's tokens and log-probabilities as vLLM has them, where a request asks for them."""
    found: dict[str, Any] = {}
    if request.return_token_ids:
        found["prompt_token_ids"] = text.prompt_token_ids
    if request.prompt_logprobs is not None and text.prompt_logprobs is not None:
        num_top = request.prompt_logprobs
        found["prompt_logprobs"] = [_prompt_entry(place, num_top, text.token_bytes) for place in text.prompt_logprobs]
    return found


def _prompt_entry(
    place: TokenLogprobs | None, num_top: int, token_bytes: Mapping[int, bytes]
) -> dict[str, dict[str, Any]] | None:
    """The token that stands there and the most likely ones, by id; the first token has none."""
    if place is None:
        return None
    return {
        str(each.token_id): {
            "logprob": max(each.logprob, LEAST),
            "rank": each.rank,
            "decoded_token": token_bytes[each.token_id].decode(errors="replace"),
        }
        for each in (place.token, *place.top[:num_top])
    }


def chat_logprobs(text: Text, names_ids: bool = False) -> dict[str, Any] | None:
    """``choices[].logprobs`` of a chat, for new text; `names_ids`: tokens are called ``token_id:ID``."""
    if text.logprobs is None:
        return None
    content = [
        _chat_entry(place.token, text.token_bytes, names_ids)
        | {"top_logprobs": [_chat_entry(entry, text.token_bytes, names_ids) for entry in place.top]}
        for place in text.logprobs
    ]
    return {"content": content, "refusal": None}


def _chat_entry(entry: Logprob, token_bytes: Mapping[int, bytes], names_ids: bool) -> dict[str, Any]:
    data = token_bytes[entry.token_id]
    token = f"token_id:{entry.token_id}" if names_ids else data.decode(errors="replace")
    return {"token": token, "logprob": max(entry.logprob, LEAST), "bytes": list(data)}


class CompletionLogprobs:
    """``choices[].logprobs`` of one completion, piece by piece: keeps where in the text the next token begins.

    Args:
        skips_special: the output's text leaves special tokens out.
        num_echoed: most likely tokens at each place of the echoed prompt; None where it is not echoed.
        names_ids: tokens are called ``token_id:ID``.
    """

    def __init__(self, skips_special: bool, num_echoed: int | None = MAX_LOGPROBS, names_ids: bool = False) -> None:
        self._skips_special, self._num_echoed, self._names_ids = skips_special, num_echoed, names_ids
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._offset = 0

    def push(self, text: Text) -> dict[str, Any] | None:
        """The part about new text, the echoed prompt's tokens first."""
        result: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        has_echo = self._num_echoed is not None and text.prompt_logprobs is not None
        if has_echo and text.prompt_logprobs is not None and text.prompt_token_ids is not None:
            for token_id, prompt_place in zip(text.prompt_token_ids, text.prompt_logprobs, strict=True):
                token = text.token_bytes[token_id]
                is_shown = token_id not in text.special_ids or self._is_next(token, text)
                is_first = is_shown and self._offset == 0
                if prompt_place is not None:
                    prompt_place = TokenLogprobs(prompt_place.token, prompt_place.top[: self._num_echoed])
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
        result["tokens"].append(self._name(token_id, token_bytes))
        result["text_offset"].append(self._offset)
        result["token_logprobs"].append(None if place is None else max(place.token.logprob, LEAST))
        result["top_logprobs"].append(None if place is None else self._top(place, token_bytes))
        if is_shown:
            self._offset += len(self._decode(token_bytes[token_id]))

    def _top(self, place: TokenLogprobs, token_bytes: Mapping[int, bytes]) -> dict[str, float]:
        """The most likely tokens and the one that stands there."""
        return {self._name(e.token_id, token_bytes): max(e.logprob, LEAST) for e in (place.token, *place.top)}

    def _name(self, token_id: int, token_bytes: Mapping[int, bytes]) -> str:
        return f"token_id:{token_id}" if self._names_ids else _token_text(token_bytes[token_id])


def _token_text(data: bytes) -> str:
    """As text; what is no text, as OpenAI writes it, so that different tokens stay different keys."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
