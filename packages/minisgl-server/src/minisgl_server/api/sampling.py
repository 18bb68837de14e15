"""Sampling parameters from a request and the model's defaults."""

from __future__ import annotations

from typing import Any, NamedTuple

from minisgl_core.errors import InvalidValueError
from minisgl_core.messages import EngineInfo
from minisgl_core.sampling_params import SamplingParams
from minisgl_server.api.forms import form_of
from minisgl_server.api.schemas import ChatRequest, CompletionRequest, GenerationRequest, SamplingFields

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions; chats go on to the end of the context."""

_SAME_NAME = ("min_tokens", *SamplingFields.model_fields)


class Wanted(NamedTuple):
    """How a request wants its outputs.

    Attributes:
        sampling: the request's, or the model's defaults.
        max_tokens_is_default: nobody asked for this many tokens, so that they may be less.
        names: what the request calls fields of `sampling`, where it calls them otherwise.
    """

    sampling: SamplingParams
    max_tokens_is_default: bool
    names: dict[str, str]


def sampling_of(request: GenerationRequest, info: EngineInfo) -> Wanted:
    """How a chat or a completion is sampled.

    Raises:
        InvalidValueError: names the request's field.
    """
    values: dict[str, Any] = dict(info.default_sampling)
    values |= {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    limit_name, max_tokens, most = "max_tokens", request.max_tokens, info.max_seq_len
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
        most = COMPLETION_MAX_TOKENS
        values["logprobs"] = request.logprobs
    values["prompt_logprobs"], prompt_logprobs_name = _prompt_logprobs(request), "prompt_logprobs"
    if values["prompt_logprobs"] != request.prompt_logprobs:
        prompt_logprobs_name = logprobs_name
    _check_grammar_provider(request, info)
    values["structured_outputs"] = form_of(request)[0]
    values["max_tokens"] = max(most, request.min_tokens or 0) if max_tokens is None else max_tokens
    names = {"max_tokens": limit_name, "logprobs": logprobs_name, "prompt_logprobs": prompt_logprobs_name}
    try:
        return Wanted(SamplingParams(**values), max_tokens is None, names)
    except InvalidValueError as error:
        raise error.renamed(names) from None


def _prompt_logprobs(request: GenerationRequest) -> int | None:
    """Return how many to compute: as many as the request asks for, or the echoed prompt of a completion has."""
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidValueError("prompt_logprobs", request.prompt_logprobs, "left out where stream is true")
    echoed = request.logprobs if isinstance(request, CompletionRequest) and request.echo else None
    asked = [each for each in (request.prompt_logprobs, echoed) if each is not None]
    return max(asked, default=None)


def _check_grammar_provider(request: GenerationRequest, info: EngineInfo) -> None:
    names = {"llguidance": ["guidance"]}.get(info.grammar, [])
    allowed = ["auto", info.grammar, *names]
    if request.guided_decoding_backend not in (None, *allowed):
        remedy = "Launch with --grammar to choose another."
        raise InvalidValueError(
            "guided_decoding_backend", request.guided_decoding_backend, " or ".join(allowed), remedy
        )


def _chat_logprobs(request: ChatRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise InvalidValueError("top_logprobs", request.top_logprobs, "left out unless logprobs is true")
    return None
