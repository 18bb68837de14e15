"""Sampling parameters of a request, on top of the model's defaults."""

from typing import Any, NamedTuple

from minisgl_core.errors import InvalidValueError
from minisgl_core.protocol.messages import EngineInfo, Tokenize
from minisgl_core.sampling_params import SamplingParams
from minisgl_server.api.openai.response_format import requested_structured_outputs
from minisgl_server.api.openai.schemas import ChatRequest, CompletionRequest, GenerationRequest, SamplingFields

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of max_tokens for completions; chats may fill the context."""

_SAME_NAMES = ("min_tokens", *SamplingFields.model_fields)


class RequestSampling(NamedTuple):
    """Sampling parameters of a request: its own values, and the model's defaults for the others.

    Attributes:
        max_tokens_is_default: the request has no limit, so that max_tokens may be lowered to fit the context.
        field_names: the request's name of each field of `sampling` that it calls differently.
        grammar_name: the request's field that asks for structured output; empty if there is none.
    """

    sampling: SamplingParams
    max_tokens_is_default: bool
    field_names: dict[str, str]
    grammar_name: str = ""

    def tokenize(self, prompt_name: str, **fields: Any) -> Tokenize:
        """Return the message to a tokenizer worker for one prompt, without id; `prompt_name` is the field that holds it."""
        return Tokenize(
            request_id="",
            sampling=self.sampling,
            max_tokens_is_default=self.max_tokens_is_default,
            grammar_name=self.grammar_name,
            field_names={**self.field_names, "prompt": prompt_name},
            **fields,
        )


def request_sampling(request: GenerationRequest, info: EngineInfo) -> RequestSampling:
    """Return the sampling parameters of a chat or a completion."""
    values: dict[str, Any] = dict(info.default_sampling)
    values |= {name: value for name in _SAME_NAMES if (value := getattr(request, name)) is not None}
    limit_name, max_tokens, default_max_tokens = "max_tokens", request.max_tokens, info.max_seq_len
    logprobs_name = "logprobs"
    if isinstance(request, ChatRequest):
        if request.max_completion_tokens is not None:
            if max_tokens is not None:
                allowed = "left out if max_completion_tokens is given"
                raise InvalidValueError("max_tokens", max_tokens, allowed)
            limit_name, max_tokens = "max_completion_tokens", request.max_completion_tokens
        logprobs_name = "top_logprobs"
        if request.top_logprobs and not request.logprobs:
            raise InvalidValueError("top_logprobs", request.top_logprobs, "left out unless logprobs is true")
        values["logprobs"] = (request.top_logprobs or 0) if request.logprobs else None
    elif isinstance(request, CompletionRequest):
        default_max_tokens = COMPLETION_MAX_TOKENS
        values["logprobs"] = request.logprobs
    values["prompt_logprobs"] = _prompt_logprobs(request)
    is_echo_larger = values["prompt_logprobs"] != request.prompt_logprobs
    prompt_logprobs_name = logprobs_name if is_echo_larger else "prompt_logprobs"
    if request.guided_decoding_backend not in (None, "auto"):
        remedy = "Launch the server with --grammar to select its grammar backend."
        raise InvalidValueError("guided_decoding_backend", request.guided_decoding_backend, "auto or left out", remedy)
    values["structured_outputs"], grammar_name = requested_structured_outputs(request)
    values["max_tokens"] = max(default_max_tokens, request.min_tokens or 0) if max_tokens is None else max_tokens
    names = {"max_tokens": limit_name, "logprobs": logprobs_name, "prompt_logprobs": prompt_logprobs_name}
    try:
        return RequestSampling(SamplingParams(**values), max_tokens is None, names, grammar_name)
    except InvalidValueError as error:
        raise error.renamed(names) from None


def _prompt_logprobs(request: GenerationRequest) -> int | None:
    """Return the number of top log-probabilities to compute per prompt token: of ``prompt_logprobs``, or of an echoed prompt."""
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidValueError("prompt_logprobs", request.prompt_logprobs, "left out if stream is true")
    echoed = request.logprobs if isinstance(request, CompletionRequest) and request.echo else None
    requested = [each for each in (request.prompt_logprobs, echoed) if each is not None]
    return max(requested, default=None)
