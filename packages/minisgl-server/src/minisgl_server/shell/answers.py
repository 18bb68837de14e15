"""Where the shell's answers come from: a model in this process, or a server."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

import httpx

from minisgl_core.errors import InvalidValueError, MinisglError
from minisgl_core.sampling_params import SamplingParams
from minisgl_server.shell.settings import Turn

Message = dict[str, str]


Show = Callable[[str], None]
"""Takes the next piece of an answer."""


class Answers(Protocol):
    """Answers conversations.

    Attributes:
        name: the model's.
    """

    name: str

    def answer(self, messages: Sequence[Message], show: Show, settings: Mapping[str, Any]) -> Turn:
        """Show the answer piece by piece; Ctrl-C stops it and returns.

        Args:
            messages: the conversation.
            show: takes the pieces.
            settings: sampling parameters by name; the model's own where they are missing.
        """


class LocalModel:
    """A model in this process.

    Args:
        options: of the engine, by name.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        from minisgl_core.llm import LLM

        self._llm = LLM(**options)
        self.name = self._llm.info.model

    def answer(self, messages: Sequence[Message], show: Show, settings: Mapping[str, Any]) -> Turn:
        """See `Answers`. Ctrl-C waits for the step that runs: it must not break one."""
        from minisgl_core.text.prompt import encode_chat

        token_ids = encode_chat(self._llm.tokenizer, messages)
        room = self._llm.info.max_seq_len - len(token_ids)
        if room < 1:
            allowed = f"at most {self._llm.info.max_seq_len - 1} tokens"
            raise InvalidValueError("the conversation", f"{len(token_ids)} tokens", allowed)
        limit = min(room, settings.get("max_tokens", room))
        sampling = SamplingParams(**self._llm.info.default_sampling | {**settings, "max_tokens": limit})
        watch, stats = _Watch(show), self._llm.stats
        num_cached, num_output = stats.num_cached_tokens, stats.num_output_tokens
        interrupts: list[int] = []
        before = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
        pieces = self._llm.stream(token_ids, sampling)
        try:
            for piece in pieces:
                watch.show(piece)
                if interrupts:
                    break
        finally:
            pieces.close()  # type: ignore[attr-defined]  # a generator
            signal.signal(signal.SIGINT, before)
        return watch.turn(
            num_prompt=len(token_ids),
            num_cached=stats.num_cached_tokens - num_cached,
            num_output=stats.num_output_tokens - num_output,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._llm.close()


class RemoteModel:
    """The first model of an OpenAI-compatible server.

    Args:
        url: the server's, with or without ``/v1``.
        api_key: where the server wants one.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        try:
            answer = httpx.get(f"{self._url}/models", timeout=10.0, headers=self._headers)
            _check(answer)
            self.name: str = answer.json()["data"][0]["id"]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError) as error:
            raise InvalidValueError("--url", url, "the address of a running server", f"{error}.") from error

    def answer(self, messages: Sequence[Message], show: Show, settings: Mapping[str, Any]) -> Turn:
        """See `Answers`; Ctrl-C closes the connection, which the server takes as an abort."""
        watch, usage = _Watch(show), dict[str, Any]()
        body = {"model": self.name, "messages": list(messages), "stream": True, **settings}
        try:
            asyncio.run(self._answer(body | {"stream_options": {"include_usage": True}}, watch, usage))
        except KeyboardInterrupt:
            pass
        except httpx.HTTPError as error:
            raise MinisglError(f"The server does not answer: {error}") from error
        details = usage.get("prompt_tokens_details") or {}
        return watch.turn(
            num_prompt=usage.get("prompt_tokens"),
            num_cached=details.get("cached_tokens"),
            num_output=usage.get("completion_tokens"),
        )

    async def _answer(self, body: dict[str, Any], watch: _Watch, usage: dict[str, Any]) -> None:
        url = f"{self._url}/chat/completions"
        timeout = httpx.Timeout(None, connect=10.0)
        async with (
            httpx.AsyncClient(timeout=timeout, headers=self._headers) as client,
            client.stream("POST", url, json=body) as answer,
        ):
            if answer.is_error:
                await answer.aread()
            _check(answer)
            async for line in _lines(answer):
                for text in _contents(line, usage):
                    watch.show(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _Watch:
    """Times an answer as it is shown."""

    def __init__(self, show: Show) -> None:
        self._show = show
        self._start_s = time.perf_counter()
        self._first_s: float | None = None

    def show(self, piece: str) -> None:
        """Show the next piece."""
        if self._first_s is None:
            self._first_s = time.perf_counter() - self._start_s
        self._show(piece)

    def turn(self, **counts: int | None) -> Turn:
        """The answer has ended."""
        return Turn(first_s=self._first_s, total_s=time.perf_counter() - self._start_s, **counts)


async def _lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The body's lines. httpx's own end at U+2028 and the like as well, which may stand inside a JSON string."""
    rest = b""
    async for data in answer.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line


def _contents(line: bytes, usage: dict[str, Any]) -> Iterator[str]:
    """The text in a line of server-sent events; `usage` takes the usage, if that is there."""
    data = line.removeprefix(b"data:").strip()
    if line.startswith(b"data:") and data != b"[DONE]":
        chunk = json.loads(data)
        if "error" in chunk:
            raise MinisglError(chunk["error"]["message"])
        usage.update(chunk.get("usage") or {})
        for choice in chunk["choices"]:
            if text := choice["delta"].get("content"):
                yield text


def _check(answer: httpx.Response) -> None:
    if answer.is_error:
        try:
            message = answer.json()["error"]["message"]
        except (ValueError, LookupError, TypeError):
            message = f"The server answers with status {answer.status_code}."
        raise MinisglError(message)
