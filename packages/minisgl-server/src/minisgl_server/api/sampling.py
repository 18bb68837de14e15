"""Sampling parameters from a request and the model's defaults."""

from __future__ import annotations

from typing import Any

from minisgl_core.errors import InvalidValueError
from minisgl_core.messages import EngineInfo
from minisgl_core.sampling_params import SamplingParams
from minisgl_server.api.forms import form_of
from minisgl_server.api.schemas import ChatRequest, CompletionRequest, GenerationRequest, SamplingFields

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions; chats go on to the end of the context."""

_SAME_NAME = ("min_tokens", *SamplingFields.model_fields)


def sampling_of(request: GenerationRequest, info: EngineInfo) -> tuple[SamplingParams, bool]:
    """Sampling of a request, and whether its max_tokens is to reach to the end of the context.

    Raises:
        InvalidValueError: names the request's field.
    """
    values: dict[str, Any] = dict(info.default_sampling)
    values |= {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    limit_name, max_tokens = "max_tokens", request.max_tokens
    logprobs_name = "logprobs"
    if isinstance(request, ChatRequest):
        if request.max_completion_tokens is not None:
            if max_tokens is not None:
                allowed = "left out where max_completion_tokens is given"
                raise InvalidValueError("max_tokens", max_tokens, allowed)
            limit_name, max_tokens = "max_completion_tokens", request.max_completion_tokens
        logprobs_name = "top_logprobs"
        values["logprobs"] = _chat_logprobs(request)
    elif isinstance(request, CompletionRequest):
        max_tokens = COMPLETION_MAX_TOKENS if max_tokens is None else max_tokens
        values["logprobs"] = request.logprobs
        values["prompt_logprobs"] = request.logprobs if request.echo else None
    values["structured_outputs"] = form_of(request)[0]
    is_default = max_tokens is None and "max_tokens" not in values
    if max_tokens is not None:
        values["max_tokens"] = max_tokens
    elif is_default:
        values["max_tokens"] = info.max_seq_len
    try:
        return SamplingParams(**values), is_default
    except InvalidValueError as error:
        names = {"max_tokens": limit_name, "logprobs": logprobs_name, "prompt_logprobs": logprobs_name}
        raise InvalidValueError(names.get(error.name, error.name), error.value, error.allowed, error.remedy) from None


def _chat_logprobs(request: ChatRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs is not None:
        raise InvalidValueError("top_logprobs", request.top_logprobs, "left out unless logprobs is true")
    return None
