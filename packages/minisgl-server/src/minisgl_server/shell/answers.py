"""Where the shell's answers come from: a model in this process, or a server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, Self

import httpx

from minisgl_core.errors import InvalidValueError, MinisglError
from minisgl_core.sampling_params import SamplingParams

Message = dict[str, str]


class Answers(Protocol):
    """Answers conversations.

    Attributes:
        name: the model's.
        may_be_interrupted: whether an exception may be raised at any place while an answer is made. An engine in this
            process must finish its step; a connection can just be closed.
    """

    name: str
    may_be_interrupted: bool

    def stream(self, messages: Sequence[Message]) -> Iterator[str]:
        """The answer, piece by piece; closing the iterator stops it."""


class LocalModel:
    """A model in this process.

    Args:
        options: of the engine, by name.
    """

    may_be_interrupted = False

    def __init__(self, options: dict[str, Any]) -> None:
        from minisgl_core.llm import LLM

        self._llm = LLM(**options)
        self.name = self._llm.info.model

    def stream(self, messages: Sequence[Message]) -> Iterator[str]:
        """See `Answers`; goes on to the end of the context."""
        from minisgl_core.text.prompt import encode_chat

        token_ids = encode_chat(self._llm.tokenizer, messages)
        room = self._llm.info.max_seq_len - len(token_ids)
        if room < 1:
            allowed = f"at most {self._llm.info.max_seq_len - 1} tokens"
            raise InvalidValueError("the conversation", f"{len(token_ids)} tokens", allowed)
        sampling = SamplingParams(**self._llm.info.default_sampling | {"max_tokens": room})
        return self._llm.stream(token_ids, sampling)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._llm.close()


class RemoteModel:
    """The first model of an OpenAI-compatible server.

    Args:
        url: the server's, with or without ``/v1``.
    """

    may_be_interrupted = True

    def __init__(self, url: str) -> None:
        base = url.rstrip("/").removesuffix("/v1")
        self._client = httpx.Client(base_url=f"{base}/v1", timeout=httpx.Timeout(None, connect=10.0))
        try:
            answer = self._client.get("models", timeout=10.0)
            _check(answer)
            self.name: str = answer.json()["data"][0]["id"]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError) as error:
            raise InvalidValueError("--url", url, "the address of a running server", f"{error}.") from error

    def stream(self, messages: Sequence[Message]) -> Iterator[str]:
        """See `Answers`."""
        body = {"model": self.name, "messages": list(messages), "stream": True}
        try:
            with self._client.stream("POST", "chat/completions", json=body) as answer:
                if answer.is_error:
                    answer.read()
                _check(answer)
                yield from _contents(answer.iter_lines())
        except httpx.HTTPError as error:
            raise MinisglError(f"The server does not answer: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()


def _contents(lines: Iterator[str]) -> Iterator[str]:
    """The text in server-sent events."""
    for line in lines:
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
