"""Sends one request to a server, and records its events and their times."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from minisgl_core.utils.exceptions import shortened
from minisgl_server.bench.serve.http_client import HttpClient, HttpError

Prompt = Sequence[int] | str | list[dict[str, str]]
"""Token ids, a text, or the messages of a chat."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    """Fields of an event that are read; the decoder skips the others."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Record:
    """Record of one request; times in seconds.

    Attributes:
        turn: number of its turn in the conversation, from 0.
        asked_prompt_tokens: tokens of the sent prompt; None if only the server knows them.
        sent_s: time of sending, since the start of the run.
        wait_s: time from the conversation's arrival to sending its first turn, because of ``--max-concurrency`` or the load
            generator; 0 for later turns.
        ttft_s: time to the first text, or to the end if there was none.
        latency_s: time to the last event.
        gaps_s: times between events with text.
        num_prompt_tokens: prompt tokens by the server's usage; without it, as requested, or 0.
        num_output_tokens: output tokens by the server's usage; without it, the number of events with text.
        num_cached_tokens: prompt tokens from the prefix cache; None if the server does not return them.
        error: error message; None for a complete response.
        is_interrupted: the user interrupted the benchmark while it ran.
    """

    conversation: int
    turn: int
    asked_prompt_tokens: int | None
    asked_output_tokens: int
    sent_s: float = 0.0
    wait_s: float = 0.0
    ttft_s: float = 0.0
    latency_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    has_usage: bool = False
    num_cached_tokens: int | None = None
    error: str | None = None
    is_interrupted: bool = False

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None for fewer than two tokens."""
        if self.num_output_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class ApiClient:
    """Client of an OpenAI-compatible API, with the parameters that all requests share.

    `ignore_eos` requests outputs of exactly the given length, by an extension of vLLM, SGLang and minisgl.
    """

    http: HttpClient
    endpoint: str
    model: str
    ignore_eos: bool
    extra_body: dict[str, Any]
    timeout_s: float

    def body(self, prompt: Prompt, num_tokens: int) -> bytes:
        """Return the JSON body of a request."""
        if self.endpoint == "chat":
            body: dict[str, Any] = {"messages": prompt, "max_completion_tokens": num_tokens}
        else:
            body = {"prompt": prompt, "max_tokens": num_tokens}
        body |= {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return _encode(body | self.extra_body)

    async def send(self, prompt: Prompt, record: Record, start_s: float) -> str:
        """Send a request and fill in its record. Return the text of the response. `start_s` is the start of the run."""
        body = self.body(prompt, record.asked_output_tokens)
        record.num_prompt_tokens = record.asked_prompt_tokens or 0
        sent = time.perf_counter()
        record.sent_s = sent - start_s
        reader = _StreamReader(record, sent)
        try:
            async with asyncio.timeout(self.timeout_s):
                path = "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"
                status = await self.http.request("POST", path, body, reader.feed)
            reader.finish(status)
        except TimeoutError:
            record.error = f"no complete response within {self.timeout_s:g} s"
        except HttpError as error:
            record.error = str(error)
        except asyncio.CancelledError:
            record.is_interrupted = True
            raise
        finally:
            if not record.latency_s:
                record.latency_s = time.perf_counter() - sent
        return "".join(reader.pieces)


class _StreamReader:
    """Reads the server-sent events of a response as they arrive."""

    def __init__(self, record: Record, sent: float) -> None:
        self.pieces: list[str] = []
        self._record, self._sent = record, sent
        self._rest = self._other = b""
        self._last = 0.0
        self._is_finished = False

    def feed(self, data: bytes, now: float) -> None:
        """Add bytes of the body, which arrived at `now`."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now)
            elif len(self._other) < 4096:
                self._other += line

    def _take(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            return
        try:
            event = _decode_event(data)
        except msgspec.DecodeError:
            self._record.error = f"an event is not in OpenAI's format: {_shortened(data)}"
            return
        if event.error is not None:
            self._record.error = _error_message(data) or "an error without a message"
        if event.usage is not None:
            self._count(event.usage)
        for choice in event.choices:
            delta = choice.delta
            text = choice.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning)) or ""
            if text or (delta and delta.tool_calls):
                self._mark(now)
                self.pieces.append(text)
            if choice.finish_reason is not None:
                self._is_finished = True
                if not self._last:
                    self._mark(now)
                self._record.latency_s = now - self._sent

    def _mark(self, now: float) -> None:
        if self._last:
            self._record.gaps_s.append(now - self._last)
        else:
            self._record.ttft_s = now - self._sent
        self._last = now

    def _count(self, usage: _Usage) -> None:
        record, details = self._record, usage.prompt_tokens_details
        record.has_usage = True
        record.num_prompt_tokens, record.num_output_tokens = usage.prompt_tokens, usage.completion_tokens
        record.num_cached_tokens = details.cached_tokens if details else None

    def finish(self, status: int) -> None:
        """Complete the record at the end of the response."""
        if status != 200:
            body = self._other + self._rest
            self._record.error = f"HTTP {status}: {_error_message(body) or _shortened(body)}"
        elif self._record.error is None and not self._is_finished:
            self._record.error = "the stream ended without a finish reason"
        if not self._record.has_usage:
            self._record.num_output_tokens = len(self.pieces)


def _error_message(body: bytes) -> str:
    """Return the message of an error in the formats of OpenAI, vLLM and SGLang, or an empty text."""
    try:
        content = msgspec.json.decode(body)
        for name in ("error", "detail"):
            if isinstance(content, dict):
                content = content.get(name, content)
        message = content.get("message", "") if isinstance(content, dict) else content
    except msgspec.DecodeError:
        return ""
    return _shortened(str(message).encode())


def _shortened(data: bytes) -> str:
    return shortened(" ".join(data.decode("utf-8", "replace").split()), 200)
