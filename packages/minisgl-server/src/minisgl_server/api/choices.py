"""Running a request to its end: what chats and completions have in common."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from minisgl_core.logs import REQUEST_ID
from minisgl_core.messages import EngineInfo, Text, Tokenize
from minisgl_core.sampling_params import SamplingParams
from minisgl_server.api.access import access_of
from minisgl_server.api.body import BodyMemory, read_body
from minisgl_server.api.engine_client import EngineClient, Generation
from minisgl_server.api.errors import ApiError, invalid_body, model_not_found, not_ready
from minisgl_server.api.forms import form_of
from minisgl_server.api.limits import RequestLimits, limits_of
from minisgl_server.api.sampling import Wanted
from minisgl_server.api.schemas import GenerationRequest

R = TypeVar("R", bound=BaseModel)

_SMALL = 2**16
"""Bytes that are decoded and validated at once; larger bodies by a thread, so that the event loop has its turns."""
_MOST_SHARED_BYTES = 32 * 2**20
"""Of what each output of a request gets a copy of, all copies together."""
_numbers = itertools.count(1)
"""Make ids unique: clients may name several requests alike."""


async def parse(kind: type[R], request: Request) -> R:
    """The body of a request.

    Raises:
        ApiError: 400, it is not what it should be; 413, 415 and 429, see `read_body`; 503, the engine still starts.
    """
    limits = limits_of(request.app)
    if limits is None:
        raise not_ready()
    memory: BodyMemory = request.app.state.body_memory
    with memory.share(limits) as count:
        body = await read_body(request, limits, count)
        if len(body) <= _SMALL:
            return _validated(kind, body, limits)
        return await asyncio.to_thread(_validated, kind, body, limits)


def _validated(kind: type[R], body: bytearray, limits: RequestLimits) -> R:
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from None
    body.clear()
    try:
        return kind.model_validate(data, context=limits)
    except ValidationError as error:
        raise invalid_body(error) from None


def check(request: GenerationRequest, served: str) -> None:
    """Refuse another model than the one served, and options of streams where there is none."""
    check_model(request.model, served)
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options is allowed only where stream is true.", "stream_options")


def check_model(name: str | None, served: str) -> None:
    """Refuse another model than the one served."""
    if name is not None and name != served:
        raise model_not_found(name, served)


class Choices:
    """The outputs of one HTTP request: n for each prompt, numbered prompt by prompt.

    Args:
        prefix: of the answer's id, such as ``chatcmpl``.
        model: name of the model in the answer.
        prompts: one `Tokenize` a prompt, without ids; `sampling` in it has the request's n.
        info: the engine's limits.

    Raises:
        ApiError: 400, the engine never takes so many outputs at a time.
    """

    def __init__(self, prefix: str, model: str, prompts: Sequence[Tokenize], info: EngineInfo) -> None:
        self.id = f"{prefix}-{REQUEST_ID.get()}-{next(_numbers):x}"
        self._model = model
        self._created = int(time.time())
        self.sampling = prompts[0].sampling
        self._n = n = self.sampling.n
        if (count := len(prompts) * n) > info.max_requests:
            raise ApiError(
                400,
                f"{len(prompts)} prompts with n={n} are {count} outputs, and the server holds {info.max_requests} at a time "
                "(--max-running-requests and --max-queued-requests); send fewer at once.",
                "n" if n > 1 else prompts[0].field_names.get("prompt", "prompt"),
            )
        RequestLimits.of(info).check_conversation(prompts[0])
        _check_copies(self.sampling, count)
        self.output_ids = [f"{self.id}-{place}" for place in range(count)]
        self._requests = [
            msgspec.structs.replace(
                prompt, request_id=self.output_ids[first], sibling_ids=self.output_ids[first + 1 : first + n]
            )
            for prompt, first in zip(prompts, range(0, count, n), strict=True)
        ]
        self._num_prompt_tokens = [0] * len(prompts)
        self._num_cached_tokens = [0] * len(prompts)
        self._num_tokens = 0
        self._num_reasoning_tokens = [0] * count

    async def start(self, client: EngineClient, request: Request) -> tuple[Generation, list[tuple[int, Text]]]:
        """Send the requests to the engine and wait for the first output, so that a refusal can have its status.

        Raises:
            ApiError: a request was refused.
        """
        generation = client.start(self._requests, request.receive)
        access_of(request.scope).usage = self.usage
        try:
            return generation, self.count(await generation.next())
        except BaseException:
            generation.close()
            raise

    async def more(self, generation: Generation) -> list[tuple[int, Text]]:
        """The next output; empty at the end."""
        return self.count(await generation.next())

    def count(self, outputs: list[tuple[int, Text]]) -> list[tuple[int, Text]]:
        """Note what the usage is made of; a prompt counts once, however many outputs it has."""
        for place, text in outputs:
            self._num_tokens += len(text.token_ids)
            self._num_reasoning_tokens[place] = text.num_reasoning_tokens
            if place % self._n == 0:
                self._num_prompt_tokens[place // self._n] = text.num_prompt_tokens
                self._num_cached_tokens[place // self._n] = text.num_cached_tokens
            if text.finish_reason == "abort":
                raise ApiError(500, "The engine aborted the request.", code="aborted")
        return outputs

    def body(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """An answer or a chunk of one."""
        head = {"id": self.id, "object": kind, "created": self._created, "model": self._model}
        return {**head, "choices": choices, **more}

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage so far."""
        num_prompt = sum(self._num_prompt_tokens)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_tokens,
            "total_tokens": num_prompt + self._num_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached_tokens)},
            "completion_tokens_details": {"reasoning_tokens": sum(self._num_reasoning_tokens)},
        }


def _check_copies(sampling: SamplingParams, num_outputs: int) -> None:
    """Refuse many outputs beside large sampling parameters, as each output is sent to the engine with its own copy.

    Raises:
        ApiError: 400, the copies are too large together.
    """
    num_bytes = len(msgspec.msgpack.encode(sampling))
    if num_outputs * num_bytes > _MOST_SHARED_BYTES:
        message = f"The sampling parameters take {num_bytes} bytes, and there are {num_outputs} outputs that each need a copy."
        allowed = f"At most {_MOST_SHARED_BYTES // num_bytes} outputs may be asked for with them at once."
        raise ApiError(400, f"{message} {allowed}", "n" if sampling.n > 1 else "prompt")


def tokenize(request: GenerationRequest, wanted: Wanted, prompt_name: str = "prompt", **more: Any) -> Tokenize:
    """A prompt of a request, without id; `prompt_name`: the field that holds it."""
    return Tokenize(
        request_id="",
        sampling=wanted.sampling,
        max_tokens_is_default=wanted.max_tokens_is_default,
        priority=request.priority or 0,
        user=request.user or "",
        cache_salt=request.cache_salt or "",
        form_name=form_of(request)[1],
        add_special_tokens=request.add_special_tokens,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        return_prompt_ids=bool(request.return_token_ids),
        field_names={**wanted.names, "prompt": prompt_name},
        **more,
    )


def served_model(app: FastAPI) -> tuple[EngineInfo, str]:
    """The engine and the name that its model is served under.

    Raises:
        ApiError: 503, it is not ready.
    """
    info = app.state.client.ready_info()
    return info, app.state.served_model_name or info.model


def json_response(body: dict[str, Any] | list[dict[str, Any]]) -> Response:
    """A successful answer."""
    return Response(msgspec.json.encode(body), media_type="application/json")
