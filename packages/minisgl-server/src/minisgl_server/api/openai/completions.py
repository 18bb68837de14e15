"""Route ``POST /v1/completions``."""

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from minisgl_core.errors import InvalidValueError, Summary
from minisgl_core.protocol.messages import Text
from minisgl_core.sampling_params import SamplingParams
from minisgl_server.api.openai.choices import Choices, make_tokenize
from minisgl_server.api.openai.event_stream import ChoiceEvents, EventStreamResponse
from minisgl_server.api.openai.logprobs import CompletionLogprobs, prompt_fields
from minisgl_server.api.openai.requests import json_response, parse_request, served_model
from minisgl_server.api.openai.sampling import request_sampling
from minisgl_server.api.openai.schemas import CompletionRequest, StreamOptions
from minisgl_server.api.openapi import route_docs
from minisgl_server.api.response_models import CompletionResponse

router = APIRouter()

MAX_PROMPTS = 2048
"""Maximum number of prompts per request."""


@router.post("/v1/completions", **route_docs(CompletionResponse, CompletionRequest))
async def completions(request: Request) -> Response:
    """Continue one or more prompts."""
    info, model = served_model(request.app)
    body = await parse_request(CompletionRequest, request)
    only_prompt = bool(body.echo) and body.max_tokens == 0
    if only_prompt:
        body.max_tokens = 1  # the engine generates at least one token
    sampling = request_sampling(body, info)
    prompts = [
        make_tokenize(body, sampling, name, echo=bool(body.echo), only_prompt=only_prompt, **prompt)
        for name, prompt in prompts_by_field("prompt", body.prompt).items()
    ]
    choices = Choices("cmpl", model, prompts, info)
    await choices.start(request.app.state.client, request)
    outputs = [_Output(body, choices.sampling, index) for index in range(len(choices.output_ids))]
    if body.stream:
        return EventStreamResponse(choices, _CompletionEvents(choices, body.stream_options, outputs))
    await choices.collect(lambda index, text: outputs[index].add(text))
    joined = []
    for output in outputs:
        joined.append(msgspec.Raw(msgspec.json.encode(output.joined())))
        await asyncio.sleep(0)  # log-probabilities may take tens of milliseconds to encode
    return json_response(choices.body("text_completion", joined, usage=choices.usage()))


def prompts_by_field(name: str, prompt: Any) -> dict[str, dict[str, Any]]:
    """Return the field of `Tokenize` for each prompt, by name: ``prompt`` for one prompt, ``prompt[0]`` and so on for a list."""
    if isinstance(prompt, str):
        return {name: {"text": prompt}}
    if prompt and isinstance(prompt[0], int):
        return {name: {"token_ids": prompt}}
    if not 1 <= len(prompt) <= MAX_PROMPTS:
        raise InvalidValueError(name, Summary(f"{len(prompt)} prompts"), f"from 1 to {MAX_PROMPTS} prompts")
    kind = "text" if isinstance(prompt[0], str) else "token_ids"
    return {f"{name}[{index}]": {kind: each} for index, each in enumerate(prompt)}


class _Output:
    """Encodes one output as a choice, or joins its parts for a response that is not streamed."""

    def __init__(self, body: CompletionRequest, sampling: SamplingParams, index: int) -> None:
        self._body, self._index = body, index
        num_prompt_logprobs = body.logprobs if body.echo else None
        tokens_as_ids = bool(body.return_tokens_as_token_ids)
        self._logprobs = CompletionLogprobs(sampling.skip_special_tokens, num_prompt_logprobs, tokens_as_ids)
        self._joined: dict[str, Any] = {}
        self._pieces: list[str] = []
        self._lists: dict[str, list[Any]] = {}
        self._joined_logprobs: dict[str, list[Any]] = {}

    def choice(self, text: Text) -> dict[str, Any]:
        """Return the choice with the new text only."""
        return {
            "index": self._index,
            "text": (text.prompt_text or "") + text.text,
            "logprobs": self._logprobs.push(text),
            "finish_reason": text.finish_reason,
            **({} if text.finish_reason is None else {"stop_reason": text.stop_reason}),
            **({"token_ids": text.token_ids} if self._body.return_token_ids else {}),
            **prompt_fields(self._body, text),
        }

    def add(self, text: Text) -> None:
        """Add the next part. Parts with the prompt come first."""
        choice = self.choice(text)
        self._pieces.append(choice["text"])
        for name in ("token_ids", "prompt_logprobs"):
            if name in choice:
                self._lists.setdefault(name, []).extend(choice[name])
        for name, values in (choice["logprobs"] or {}).items():
            self._joined_logprobs.setdefault(name, []).extend(values)
        self._joined |= choice

    def joined(self) -> dict[str, Any]:
        """Return the whole choice."""
        text = "".join(self._pieces)
        return {**self._joined, "text": text, "logprobs": self._joined_logprobs or None, **self._lists}


class _CompletionEvents(ChoiceEvents):
    def __init__(self, choices: Choices, options: StreamOptions | None, outputs: list[_Output]) -> None:
        super().__init__(choices, "text_completion", options)
        self._outputs = outputs

    def choice(self, index: int, text: Text) -> dict[str, Any]:
        return self._outputs[index].choice(text)
