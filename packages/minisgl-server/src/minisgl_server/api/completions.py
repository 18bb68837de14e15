"""``POST /v1/completions``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from minisgl_core.errors import InvalidValueError
from minisgl_core.messages import Text
from minisgl_core.sampling_params import SamplingParams
from minisgl_server.api.answers import CompletionAnswer
from minisgl_server.api.choices import Choices, check, json_response, parse, served_model, tokenize
from minisgl_server.api.engine_client import Generation
from minisgl_server.api.logprobs import CompletionLogprobs, about_prompt
from minisgl_server.api.openapi import documented
from minisgl_server.api.sampling import sampling_of
from minisgl_server.api.schemas import CompletionRequest
from minisgl_server.api.streaming import ChoiceChunks, EventStream

router = APIRouter()

MAX_PROMPTS = 2048
"""Most prompts in one request."""


@router.post(
    "/v1/completions",
    **documented(CompletionRequest, CompletionAnswer, streams=CompletionAnswer, errors=(400, 404)),
)
async def completions(request: Request) -> Response:
    """Continue one or more prompts."""
    client = request.app.state.client
    info, model = served_model(request.app)
    asked = await parse(CompletionRequest, request)
    check(asked, model)
    only_prompt = bool(asked.echo) and asked.max_tokens == 0
    if only_prompt:
        asked.max_tokens = 1  # the least that the engine does
    wanted = sampling_of(asked, info)
    prompts = [
        tokenize(asked, wanted, echo=bool(asked.echo), only_prompt=only_prompt, **prompt) for prompt in _prompts(asked)
    ]
    choices = Choices("cmpl", model, prompts, info)
    generation, first = await choices.start(client, request)
    if asked.stream:
        return EventStream(choices, generation, first, _Chunks(choices, asked))
    try:
        return await _answer(asked, choices, generation, first)
    finally:
        generation.close()


def _prompts(asked: CompletionRequest) -> list[dict[str, Any]]:
    """Each prompt as arguments of `tokenize`."""
    prompts = named_prompts("prompt", asked.prompt)
    return [
        {"prompt_name": name, "text" if isinstance(each, str) else "token_ids": each} for name, each in prompts.items()
    ]


def named_prompts(name: str, prompt: Any) -> dict[str, Any]:
    """Prompts by what the request calls them: the field's name, or with the place in its list.

    Args:
        name: of the field.
        prompt: what it holds: a text, token ids, or a list of either.

    Raises:
        InvalidValueError: there are none or too many.
    """
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return {name: prompt}
    if not 1 <= len(prompt) <= MAX_PROMPTS:
        raise InvalidValueError(name, f"{len(prompt)} prompts", f"from 1 to {MAX_PROMPTS} prompts")
    return {f"{name}[{place}]": each for place, each in enumerate(prompt)}


class _Pieces:
    """One choice, as it comes."""

    def __init__(self, asked: CompletionRequest, sampling: SamplingParams) -> None:
        self._asked = asked
        num_echoed = asked.logprobs if asked.echo else None
        names_ids = bool(asked.return_tokens_as_token_ids)
        self._logprobs = CompletionLogprobs(sampling.skip_special_tokens, num_echoed, names_ids)

    def entry(self, place: int, text: Text) -> dict[str, Any]:
        """The choice with the new text only."""
        about = {} if text.prompt_token_ids is None else about_prompt(self._asked, text)
        return {
            "index": place,
            "text": (text.prompt_text or "") + text.text,
            "logprobs": self._logprobs.push(text),
            "finish_reason": text.finish_reason,
            **({} if text.finish_reason is None else {"stop_reason": text.stop_reason}),
            **({"token_ids": text.token_ids} if self._asked.return_token_ids else {}),
            **about,
        }


async def _answer(
    asked: CompletionRequest, choices: Choices, generation: Generation, outputs: list[tuple[int, Text]]
) -> Response:
    pieces = [_Pieces(asked, choices.sampling) for _ in choices.output_ids]
    entries: list[list[dict[str, Any]]] = [[] for _ in choices.output_ids]
    while outputs:
        for place, text in outputs:
            entries[place].append(pieces[place].entry(place, text))
        outputs = await choices.more(generation)
    joined = [_join(parts) for parts in entries]
    return json_response(choices.body("text_completion", joined, usage=choices.usage()))


def _join(parts: list[dict[str, Any]]) -> dict[str, Any]:
    logprobs = [part["logprobs"] for part in parts if part["logprobs"] is not None]
    joined = {**parts[0], **parts[-1]}  # what is about the prompt comes with the first part
    if "token_ids" in joined:
        joined["token_ids"] = [token for part in parts for token in part["token_ids"]]
    return {
        **joined,
        "text": "".join(part["text"] for part in parts),
        "logprobs": {key: [x for each in logprobs for x in each[key]] for key in logprobs[0]} if logprobs else None,
    }


class _Chunks(ChoiceChunks):
    def __init__(self, choices: Choices, asked: CompletionRequest) -> None:
        super().__init__(choices, "text_completion", asked.stream_options)
        self._pieces = [_Pieces(asked, choices.sampling) for _ in choices.output_ids]

    def entry(self, place: int, text: Text) -> dict[str, Any]:
        return self._pieces[place].entry(place, text)
