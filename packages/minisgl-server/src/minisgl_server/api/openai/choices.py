"""Choices of one HTTP request: sends its prompts to the engine, and counts the tokens of its usage."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import msgspec
from fastapi import Request

from minisgl_core.errors import InvalidValueError, Summary
from minisgl_core.protocol.messages import EngineInfo, Text, Tokenize
from minisgl_core.sampling_params import MAX_BAD_WORDS_TIMES_N
from minisgl_server.api.engine_client import EngineClient, Generation
from minisgl_server.api.errors import ApiError
from minisgl_server.api.http.request_log import access_record
from minisgl_server.api.openai.requests import new_request_id
from minisgl_server.api.openai.sampling import RequestSampling
from minisgl_server.api.openai.schemas import GenerationRequest

_MAX_COPIED_BYTES = 32 * 2**20
"""Maximum bytes of the fields that every output of a request has its own copy of, over all outputs."""
_MAX_INLINE_SIZE = 64
"""`Choices.collect` yields to the event loop after each output of a larger size than this, so that other requests can run.
Tokenizer workers buffer output that is not streamed, and send it in many such parts at once. While parts have arrived,
`Generation.next` does not suspend."""
_MAX_SESSION_CHARS = 1024
"""Maximum length of the header X-Session-Id, of which every output has a copy, too."""


class Choices:
    """Engine requests of one HTTP request, and their token counts: n outputs per prompt, in order of the prompts.

    `Generation` delivers the outputs, and each route encodes them. Too many outputs, or copies of large parameters, are refused.

    Attributes:
        generation: source of the outputs; it detects by itself that the client disconnected. Set by `start`.
        first: outputs that `start` waited for.

    Args:
        prefix: prefix of the response's id, such as ``chatcmpl``.
        prompts: one `Tokenize` per prompt, without ids; its `sampling` has the request's n.
        is_buffered: all outputs are kept in memory until the last one is complete; by default if they are not streamed.
    """

    generation: Generation
    first: list[tuple[int, Text]]

    def __init__(
        self, prefix: str, model: str, prompts: Sequence[Tokenize], info: EngineInfo, is_buffered: bool | None = None
    ) -> None:
        self.id = new_request_id(prefix)
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
        _check_copies(prompts[0], count)
        self.output_ids = [f"{self.id}-{index}" for index in range(count)]
        self._requests = [
            msgspec.structs.replace(
                prompt, request_id=self.output_ids[first], sibling_ids=self.output_ids[first + 1 : first + n]
            )
            for prompt, first in zip(prompts, range(0, count, n), strict=True)
        ]
        self._field_names = prompts[0].field_names
        is_buffered = not prompts[0].is_streamed if is_buffered is None else is_buffered
        self._max_logprobs = info.max_response_logprobs if is_buffered else None
        self._num_logprobs = 0
        most = (
            count
            * (0 if self.sampling.logprobs is None else 1 + self.sampling.logprobs)
            * min(self.sampling.max_tokens, info.max_seq_len)
        )
        if self._max_logprobs is not None and most > self._max_logprobs:
            # With streaming, the log-probabilities are counted here as they arrive. Without, the tokenizer worker would hold all
            # of them uncounted. It limits those of the prompt itself.
            for each in self._requests:
                each.is_streamed = True
        # Counts in the latest `Text` of each output or prompt, of which `_totals` gets the increase.
        self._num_reasoning_tokens = [0] * count
        self._num_prompt_tokens = [0] * len(prompts)
        self._num_cached_tokens = [0] * len(prompts)
        self._totals = dict.fromkeys(("prompt", "cached", "output", "reasoning"), 0)
        """Tokens of all outputs by kind. `usage` may be called for each chunk of each output, so it must not add them up."""

    async def start(self, client: EngineClient, request: Request) -> Self:
        """Send the requests and wait for the first outputs, so that a rejection can set the HTTP status."""
        session_id = request.headers.get("x-session-id", "")
        if len(session_id) > _MAX_SESSION_CHARS:
            message = f"The header has {len(session_id)} characters, and at most {_MAX_SESSION_CHARS} are allowed."
            raise ApiError(400, message, "X-Session-Id")
        for each in self._requests:
            each.session_id = session_id
        self.generation = client.start(self._requests, request.receive)
        access_record(request.scope).usage = self.usage
        try:
            self.first = self.count_tokens(await self.generation.next())
        except BaseException:
            self.generation.close()
            raise
        return self

    async def collect(self, on_output: Callable[[int, Text], object]) -> None:
        """Call `on_output` with the index and text of each new output until all have ended, then close the generation."""
        outputs = self.first
        try:
            while outputs:
                for index, text in outputs:
                    on_output(index, text)
                    if text.size > _MAX_INLINE_SIZE:
                        await asyncio.sleep(0)
                outputs = self.count_tokens(await self.generation.next())
        finally:
            self.generation.close()

    def count_tokens(self, outputs: list[tuple[int, Text]]) -> list[tuple[int, Text]]:
        """Count the tokens of `outputs` for the usage, and return them. A prompt counts once for any n."""
        if self._max_logprobs is not None:
            self._count_logprobs(outputs, self._max_logprobs)
        totals = self._totals
        for index, text in outputs:
            totals["output"] += len(text.token_ids)
            totals["reasoning"] += text.num_reasoning_tokens - self._num_reasoning_tokens[index]
            self._num_reasoning_tokens[index] = text.num_reasoning_tokens
            prompt, sibling = divmod(index, self._n)
            if sibling == 0:
                totals["prompt"] += text.num_prompt_tokens - self._num_prompt_tokens[prompt]
                totals["cached"] += text.num_cached_tokens - self._num_cached_tokens[prompt]
                self._num_prompt_tokens[prompt] = text.num_prompt_tokens
                self._num_cached_tokens[prompt] = text.num_cached_tokens
            if text.finish_reason == "abort":
                raise ApiError(500, "The engine aborted the request.", code="aborted")
        return outputs

    def _count_logprobs(self, outputs: list[tuple[int, Text]], limit: int) -> None:
        self._num_logprobs += sum([text.size - len(text.token_ids) for _, text in outputs])
        if self._num_logprobs > limit:
            name = "prompt_logprobs" if self.sampling.logprobs is None else "logprobs"
            message = f"The response would have more than {limit} log-probabilities, too many to return at once."
            raise ApiError(400, f"{message} Ask for fewer, or for fewer outputs.", self._field_names.get(name, name))

    def body(self, object_type: str, choices: Sequence[dict[str, Any] | msgspec.Raw], **fields: Any) -> dict[str, Any]:
        """Return a response or a chunk of one; `fields` follow the choices."""
        common = {"id": self.id, "object": object_type, "created": self._created, "model": self._model}
        return {**common, "choices": choices, **fields}

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's usage object of the tokens so far."""
        totals = self._totals
        return {
            "prompt_tokens": totals["prompt"],
            "completion_tokens": totals["output"],
            "total_tokens": totals["prompt"] + totals["output"],
            "prompt_tokens_details": {"cached_tokens": totals["cached"]},
            "completion_tokens_details": {"reasoning_tokens": totals["reasoning"]},
        }


def _check_copies(prompt: Tokenize, num_outputs: int) -> None:
    """Refuse many outputs with large sampling parameters or user, as each output is sent to the engine with its own copy.

    Bad words are counted, too, because a tokenizer worker tokenizes them for each prompt.
    """
    if num_outputs == 1:
        return
    if num_outputs * (num_words := len(prompt.sampling.bad_words)) > MAX_BAD_WORDS_TIMES_N:
        allowed = f"at most {MAX_BAD_WORDS_TIMES_N // num_outputs} texts with {num_outputs} outputs"
        raise InvalidValueError(
            prompt.field_names.get("bad_words", "bad_words"), Summary(f"{num_words} texts"), allowed
        )
    num_bytes = len(msgspec.msgpack.encode(prompt.sampling)) + len(prompt.user)
    if num_outputs * num_bytes > _MAX_COPIED_BYTES:
        fields = "sampling parameters and the user" if prompt.user else "sampling parameters"
        message = f"The {fields} take {num_bytes} bytes, and there are {num_outputs} outputs that each need a copy."
        allowed = f"At most {_MAX_COPIED_BYTES // num_bytes} outputs are allowed with them."
        raise ApiError(400, f"{message} {allowed}", "n" if prompt.sampling.n > 1 else "prompt")


def make_tokenize(
    request: GenerationRequest, sampling: RequestSampling, prompt_name: str = "prompt", **fields: Any
) -> Tokenize:
    """Return the message of `RequestSampling.tokenize`, with the fields that chats and completions share."""
    return sampling.tokenize(
        prompt_name,
        priority=request.priority or 0,
        user=request.user or "",
        is_streamed=bool(request.stream),
        cache_salt=request.cache_salt or "",
        add_special_tokens=request.add_special_tokens,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        return_prompt_ids=bool(request.return_token_ids),
        **fields,
    )
