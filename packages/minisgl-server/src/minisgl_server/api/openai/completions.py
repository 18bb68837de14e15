"""Route ``POST /v1/completions``."""

from typing import Any

from fastapi import APIRouter, Request, Response

from minisgl_core.errors import InvalidValueError
from minisgl_core.protocol.messages import Text
from minisgl_core.sampling_params import SamplingParams
from minisgl_server.api.openai.choices import Choices, make_tokenize
from minisgl_server.api.openai.event_stream import ChoiceEvents, EventStreamResponse
from minisgl_server.api.openai.logprobs import CompletionLogprobs, prompt_fields
from minisgl_server.api.openai.requests import json_response, parse_request, served_model
from minisgl_server.api.openai.sampling import request_sampling
from minisgl_server.api.openai.schemas import CompletionRequest
from minisgl_server.api.openapi import route_docs
from minisgl_server.api.response_models import CompletionResponse

router = APIRouter()

MAX_PROMPTS = 2048
"""Maximum number of prompts per request."""


@router.post("/v1/completions", **route_docs(CompletionRequest, CompletionResponse, streams=True, errors=(400, 404)))
async def completions(request: Request) -> Response:
    """Continue one or more prompts."""
    info, model = served_model(request.app)
    body = await parse_request(CompletionRequest, request)
    only_prompt = bool(body.echo) and body.max_tokens == 0
    if only_prompt:
        body.max_tokens = 1  # the engine generates at least one token
    sampling = request_sampling(body, info)
    prompts = [
        make_tokenize(body, sampling, echo=bool(body.echo), only_prompt=only_prompt, **prompt)
        for prompt in _prompts(body)
    ]
    choices = Choices("cmpl", model, prompts, info)
    await choices.start(request.app.state.client, request)
    if body.stream:
        return EventStreamResponse(choices, _CompletionEvents(choices, body))
    deltas = [_ChoiceDelta(body, choices.sampling) for _ in choices.output_ids]
    builders = [_ChoiceBuilder() for _ in choices.output_ids]
    await choices.collect(lambda index, text: builders[index].add(deltas[index].entry(index, text)))
    entries = [builder.entry() for builder in builders]
    return json_response(choices.body("text_completion", entries, usage=choices.usage()))


def _prompts(body: CompletionRequest) -> list[dict[str, Any]]:
    """Return the arguments of `make_tokenize` for each prompt."""
    prompts = prompts_by_field("prompt", body.prompt)
    return [
        {"prompt_name": name, "text" if isinstance(each, str) else "token_ids": each} for name, each in prompts.items()
    ]


def prompts_by_field(name: str, prompt: Any) -> dict[str, Any]:
    """Return each prompt by its field name: ``prompt`` for one prompt, ``prompt[0]`` and so on for a list.

    Raises:
        InvalidValueError: there are no prompts, or more than `MAX_PROMPTS`.
    """
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return {name: prompt}
    if not 1 <= len(prompt) <= MAX_PROMPTS:
        raise InvalidValueError(name, f"{len(prompt)} prompts", f"from 1 to {MAX_PROMPTS} prompts")
    return {f"{name}[{index}]": each for index, each in enumerate(prompt)}


class _ChoiceDelta:
    """Turns the outputs of one choice into its entries."""

    def __init__(self, body: CompletionRequest, sampling: SamplingParams) -> None:
        self._body = body
        num_prompt_logprobs = body.logprobs if body.echo else None
        tokens_as_ids = bool(body.return_tokens_as_token_ids)
        self._logprobs = CompletionLogprobs(sampling.skip_special_tokens, num_prompt_logprobs, tokens_as_ids)

    def entry(self, index: int, text: Text) -> dict[str, Any]:
        """Return the choice with the new text only."""
        return {
            "index": index,
            "text": (text.prompt_text or "") + text.text,
            "logprobs": self._logprobs.push(text),
            "finish_reason": text.finish_reason,
            **({} if text.finish_reason is None else {"stop_reason": text.stop_reason}),
            **({"token_ids": text.token_ids} if self._body.return_token_ids else {}),
            **prompt_fields(self._body, text),
        }


class _ChoiceBuilder:
    """Joins the entries of one choice of a response that is not streamed."""

    def __init__(self) -> None:
        self._entry: dict[str, Any] = {}
        self._prompt_logprobs: list[Any] = []
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: dict[str, list[Any]] = {}

    def add(self, entry: dict[str, Any]) -> None:
        """Add the next entry. Those with parts of the prompt come first."""
        self._prompt_logprobs += entry.pop("prompt_logprobs", ())
        self._entry |= entry
        self._pieces.append(entry["text"])
        self._token_ids += entry.get("token_ids", ())
        for name, values in (entry["logprobs"] or {}).items():
            self._logprobs.setdefault(name, []).extend(values)

    def entry(self) -> dict[str, Any]:
        """Return the whole choice."""
        token_ids = {"token_ids": self._token_ids} if "token_ids" in self._entry else {}
        prompt_logprobs = {"prompt_logprobs": self._prompt_logprobs} if self._prompt_logprobs else {}
        text = "".join(self._pieces)
        return {**self._entry, "text": text, "logprobs": self._logprobs or None, **token_ids, **prompt_logprobs}


class _CompletionEvents(ChoiceEvents):
    def __init__(self, choices: Choices, body: CompletionRequest) -> None:
        super().__init__(choices, "text_completion", body.stream_options)
        self._deltas = [_ChoiceDelta(body, choices.sampling) for _ in choices.output_ids]

    def entry(self, index: int, text: Text) -> dict[str, Any]:
        return self._deltas[index].entry(index, text)
