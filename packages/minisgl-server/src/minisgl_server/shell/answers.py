"""Where the shell's answers come from: a model in this process, or a server."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, Self

import httpx

from minisgl_core.errors import InvalidValueError, MinisglError
from minisgl_core.sampling_params import SamplingParams

Message = dict[str, str]


Show = Callable[[str], None]
"""Takes the next piece of an answer."""


class Answers(Protocol):
    """Answers conversations.

    Attributes:
        name: the model's.
    """

    name: str

    def answer(self, messages: Sequence[Message], show: Show) -> None:
        """Show the answer piece by piece; Ctrl-C stops it and returns."""


class LocalModel:
    """A model in this process.

    Args:
        options: of the engine, by name.
        max_tokens: most tokens of an answer; None for as many as the context holds.
    """

    def __init__(self, options: dict[str, Any], max_tokens: int | None = None) -> None:
        from minisgl_core.llm import LLM

        self._max_tokens = max_tokens
        self._llm = LLM(**options)
        self.name = self._llm.info.model

    def answer(self, messages: Sequence[Message], show: Show) -> None:
        """See `Answers`. Ctrl-C waits for the step that runs: it must not break one."""
        from minisgl_core.text.prompt import encode_chat

        token_ids = encode_chat(self._llm.tokenizer, messages)
        room = self._llm.info.max_seq_len - len(token_ids)
        if room < 1:
            allowed = f"at most {self._llm.info.max_seq_len - 1} tokens"
            raise InvalidValueError("the conversation", f"{len(token_ids)} tokens", allowed)
        limit = room if self._max_tokens is None else min(room, self._max_tokens)
        sampling = SamplingParams(**self._llm.info.default_sampling | {"max_tokens": limit})
        interrupts: list[int] = []
        before = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
        pieces = self._llm.stream(token_ids, sampling)
        try:
            for piece in pieces:
                show(piece)
                if interrupts:
                    break
        finally:
            pieces.close()  # type: ignore[attr-defined]  # a generator
            signal.signal(signal.SIGINT, before)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._llm.close()


class RemoteModel:
    """The first model of an OpenAI-compatible server.

    Args:
        url: the server's, with or without ``/v1``.
        max_tokens: most tokens of an answer; None for the server's default.
    """

    def __init__(self, url: str, max_tokens: int | None = None) -> None:
        self._options: dict[str, Any] = {} if max_tokens is None else {"max_tokens": max_tokens}
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1"
        try:
            answer = httpx.get(f"{self._url}/models", timeout=10.0)
            _check(answer)
            self.name: str = answer.json()["data"][0]["id"]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError) as error:
            raise InvalidValueError("--url", url, "the address of a running server", f"{error}.") from error

    def answer(self, messages: Sequence[Message], show: Show) -> None:
        """See `Answers`; Ctrl-C closes the connection, which the server takes as an abort."""
        try:
            asyncio.run(self._answer(messages, show))
        except KeyboardInterrupt:
            pass
        except httpx.HTTPError as error:
            raise MinisglError(f"The server does not answer: {error}") from error

    async def _answer(self, messages: Sequence[Message], show: Show) -> None:
        body = {"model": self.name, "messages": list(messages), "stream": True, **self._options}
        url = f"{self._url}/chat/completions"
        timeout = httpx.Timeout(None, connect=10.0)
        async with httpx.AsyncClient(timeout=timeout) as client, client.stream("POST", url, json=body) as answer:
            if answer.is_error:
                await answer.aread()
            _check(answer)
            async for line in answer.aiter_lines():
                for text in _contents(line):
                    show(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _contents(line: str) -> Iterator[str]:
    """The text in a line of server-sent events."""
    data = line.removeprefix("data:").strip()
    if line.startswith("data:") and data != "[DONE]":
        chunk = json.loads(data)
        if "error" in chunk:
            raise MinisglError(chunk["error"]["message"])
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
