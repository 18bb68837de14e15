"""Log-probabilities as chat completions and completions return them."""

import codecs
from collections.abc import Mapping
from typing import Any

from minisgl_core.protocol.messages import Logprob, Text, TokenLogprobs
from minisgl_core.sampling_params import MAX_LOGPROBS
from minisgl_server.api.openai.schemas import GenerationRequest

MIN_LOGPROB = -9999.0
"""OpenAI's value for a token of probability zero; JSON has no infinity."""


def prompt_fields(request: GenerationRequest, text: Text) -> dict[str, Any]:
    """Return the fields with token ids and log-probabilities of a part of the prompt, as a request asks for them."""
    fields: dict[str, Any] = {}
    if request.return_token_ids and text.prompt_token_ids is not None:
        fields["prompt_token_ids"] = text.prompt_token_ids
    if request.prompt_logprobs is not None and text.prompt_logprobs is not None:
        num_top = request.prompt_logprobs
        fields["prompt_logprobs"] = [_prompt_entry(each, num_top, text.token_bytes) for each in text.prompt_logprobs]
    return fields


def _prompt_entry(
    logprobs: TokenLogprobs | None, num_top: int, token_bytes: Mapping[int, bytes]
) -> dict[str, dict[str, Any]] | None:
    """Return the prompt's token and the most likely ones at one position, by token id. None for the first position."""
    if logprobs is None:
        return None
    return {
        str(each.token_id): {
            "logprob": max(each.logprob, MIN_LOGPROB),
            "rank": each.rank,
            "decoded_token": token_bytes[each.token_id].decode(errors="replace"),
        }
        for each in (logprobs.token, *logprobs.top[:num_top])
    }


def chat_logprobs(text: Text, tokens_as_ids: bool = False) -> dict[str, Any] | None:
    """Return ``choices[].logprobs`` of a chat for new text. With `tokens_as_ids`, tokens are written as ``token_id:ID``."""
    if text.logprobs is None:
        return None
    content = [
        _chat_entry(each.token, text.token_bytes, tokens_as_ids)
        | {"top_logprobs": [_chat_entry(entry, text.token_bytes, tokens_as_ids) for entry in each.top]}
        for each in text.logprobs
    ]
    return {"content": content, "refusal": None}


def _chat_entry(entry: Logprob, token_bytes: Mapping[int, bytes], tokens_as_ids: bool) -> dict[str, Any]:
    data = token_bytes[entry.token_id]
    token = f"token_id:{entry.token_id}" if tokens_as_ids else data.decode(errors="replace")
    return {"token": token, "logprob": max(entry.logprob, MIN_LOGPROB), "bytes": list(data)}


class CompletionLogprobs:
    """Builds ``choices[].logprobs`` of one completion; keeps the text offset of the next token.

    Args:
        skips_special: the output's text omits special tokens.
        num_prompt_logprobs: number of top log-probabilities per token of the echoed prompt; None if the prompt is not echoed.
        tokens_as_ids: tokens are written as ``token_id:ID``.
    """

    def __init__(
        self, skips_special: bool, num_prompt_logprobs: int | None = MAX_LOGPROBS, tokens_as_ids: bool = False
    ) -> None:
        self._skips_special, self._tokens_as_ids = skips_special, tokens_as_ids
        self._num_prompt_logprobs = num_prompt_logprobs
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._offset = 0
        self._prompt_text = ""

    def push(self, text: Text) -> dict[str, Any] | None:
        """Return the entries for new text; those of the echoed prompt come first."""
        result: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if text.prompt_text is not None:
            self._prompt_text = text.prompt_text
        if self._num_prompt_logprobs is not None and text.prompt_logprobs is not None:
            for index, logprobs in enumerate(text.prompt_logprobs):
                token_id = (text.prompt_token_ids or ())[index] if logprobs is None else logprobs.token.token_id
                token = text.token_bytes[token_id]
                # The text lacks special tokens that the tokenizer added, such as BOS, or that detokenization skipped.
                is_special = token_id in text.special_ids
                is_shown = not is_special or self._prompt_text.startswith(token.decode(), self._offset)
                is_first = is_shown and self._offset == 0
                if logprobs is not None:
                    logprobs = TokenLogprobs(logprobs.token, logprobs.top[: self._num_prompt_logprobs])
                self._add(result, text, token_id, logprobs, is_shown)
                if is_first and token.startswith(b" ") and not self._prompt_text.startswith(" "):
                    self._offset -= 1  # some tokenizers prepend a space to a text, and remove it when they decode
        elif text.logprobs is None:
            return None
        for output_logprobs in text.logprobs or ():
            token_id = output_logprobs.token.token_id
            is_shown = not self._skips_special or token_id not in text.special_ids
            self._add(result, text, token_id, output_logprobs, is_shown)
        return result

    def _add(
        self, result: dict[str, Any], text: Text, token_id: int, logprobs: TokenLogprobs | None, is_shown: bool
    ) -> None:
        entries = () if logprobs is None else (logprobs.token, *logprobs.top)
        top: dict[str, float] = {}
        for each in entries:  # tokens of the same text share a key: the sampled or most likely one has it
            top.setdefault(self._name(each.token_id, text), max(each.logprob, MIN_LOGPROB))
        result["tokens"].append(self._name(token_id, text))
        result["text_offset"].append(self._offset)
        result["token_logprobs"].append(None if logprobs is None else max(logprobs.token.logprob, MIN_LOGPROB))
        result["top_logprobs"].append(top or None)
        if is_shown:
            self._offset += len(self._decode(text.token_bytes[token_id]))

    def _name(self, token_id: int, text: Text) -> str:
        """Return a token as text. Bytes that are not UTF-8 are escaped as OpenAI does; different bytes have different keys."""
        data = text.token_bytes[token_id]
        try:
            return f"token_id:{token_id}" if self._tokens_as_ids else data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
