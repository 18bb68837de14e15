"""Models that the shell chats with: one in this process, or one on a server."""

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Self

import httpx

from minisgl_core.errors import InvalidValueError, MinisglError, Summary
from minisgl_core.sampling_params import SamplingParams
from minisgl_server.remote_server import authorization, first_model, raise_for_status, server_url

Message = dict[str, str]
Show = Callable[[str, bool], None]
"""Called with the next piece of a response, and True if it is reasoning content."""


class LocalModel:
    """Model in this process.

    Attributes:
        name: name of the model.
        default_sampling: sampling parameters of its generation_config; None if they are unknown.
        was_interrupted: True if Ctrl-C stopped the latest response.
    """

    was_interrupted = False

    def __init__(self, options: dict[str, Any]) -> None:
        from minisgl_core.llm import LLM

        self._llm = LLM(**options)
        self.name, self.default_sampling = self._llm.info.model, self._llm.info.default_sampling

    def chat(self, messages: Sequence[Message], show: Show, settings: Mapping[str, Any]) -> str:
        """Generate the next message and show it piece by piece. Return a line with times and token counts.

        Ctrl-C stops it at the next piece of text. A second Ctrl-C raises KeyboardInterrupt at once, so that a long prompt can be
        stopped, too. The model's defaults apply to sampling parameters that `settings` lack.
        """
        from minisgl_core.text.prompt import encode_chat

        token_ids = encode_chat(self._llm.tokenizer, messages)
        room = self._llm.info.max_seq_len - len(token_ids)
        if room < 1:
            allowed = f"at most {self._llm.info.max_seq_len - 1} tokens"
            raise InvalidValueError(
                "the conversation", Summary(f"{len(token_ids)} tokens"), allowed, "/reset starts a new one."
            )
        limit = min(room, settings.get("max_tokens", room))
        sampling = SamplingParams(**self._llm.info.default_sampling | {**settings, "max_tokens": limit})
        timer, stats = _TurnTimer(show), self._llm.stats
        num_cached, num_output = stats.num_cached_tokens, stats.num_output_tokens
        interrupts: list[int] = []

        def interrupt(number: int, frame: FrameType | None) -> None:
            if interrupts:
                signal.default_int_handler(number, frame)
            interrupts.append(number)  # the first does not interrupt a step, which would empty the prefix cache

        before = signal.signal(signal.SIGINT, interrupt)
        pieces = self._llm.stream(token_ids, sampling)
        try:
            for piece in pieces:
                timer.show(piece)
                if interrupts:
                    break
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            pieces.close()  # type: ignore[attr-defined]  # a generator
            signal.signal(signal.SIGINT, before)
        self.was_interrupted = bool(interrupts)
        num_cached, num_output = stats.num_cached_tokens - num_cached, stats.num_output_tokens - num_output
        return timer.describe(len(token_ids), num_cached, num_output)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._llm.close()


class RemoteModel:
    """First model of an OpenAI-compatible server at a URL with or without ``/v1``; of several API keys, the first is used.

    It has the attributes of `LocalModel`.
    """

    was_interrupted = False

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url, self._headers = server_url(url), authorization(api_key)
        model = first_model(self._url, self._headers)
        self.name, defaults = model["id"], model.get("default_sampling")
        self.default_sampling = defaults if isinstance(defaults, dict) else None

    def chat(self, messages: Sequence[Message], show: Show, settings: Mapping[str, Any]) -> str:
        """Stream the next message, like `LocalModel.chat`. Ctrl-C closes the connection, and the server aborts the request."""
        timer, usage, self.was_interrupted = _TurnTimer(show), dict[str, Any](), False
        body = {"model": self.name, "messages": list(messages), "stream": True, **settings}
        try:
            asyncio.run(self._stream(body | {"stream_options": {"include_usage": True}}, timer, usage))
        except KeyboardInterrupt:
            self.was_interrupted = True
        except httpx.HTTPError as error:
            raise MinisglError(f"The server does not answer: {error}") from error
        details = usage.get("prompt_tokens_details") or {}
        num_cached, num_output = details.get("cached_tokens"), usage.get("completion_tokens")
        return timer.describe(usage.get("prompt_tokens"), num_cached, num_output)

    async def _stream(self, body: dict[str, Any], timer: "_TurnTimer", usage: dict[str, Any]) -> None:
        url = f"{self._url}/v1/chat/completions"
        timeout = httpx.Timeout(None, connect=10.0)
        async with (
            httpx.AsyncClient(timeout=timeout, headers=self._headers) as client,
            client.stream("POST", url, json=body) as response,
        ):
            if not response.is_success:
                await response.aread()
            raise_for_status(response)
            rest = b""
            # `aiter_lines` also splits at U+2028, which JSON strings may contain.
            async for data in response.aiter_bytes():
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    for text, is_reasoning in _contents(line, usage):
                        timer.show(text, is_reasoning)


class _TurnTimer:
    """Shows a response and measures its times."""

    def __init__(self, show: Show) -> None:
        self._show = show
        self._start_s = time.perf_counter()
        self._first_s: float | None = None

    def show(self, piece: str, is_reasoning: bool = False) -> None:
        if self._first_s is None:
            self._first_s = time.perf_counter() - self._start_s
        self._show(piece, is_reasoning)

    def describe(self, num_prompt: int | None, num_cached: int | None, num_output: int | None) -> str:
        """Return the statistics as one line at the end of the response. Counts may be None, such as after Ctrl-C."""
        total_s, first_s = time.perf_counter() - self._start_s, self._first_s
        parts = [] if first_s is None else [f"{first_s:.3f} s to the first token"]
        if num_output is not None and first_s is not None and num_output > 1:
            parts.append(f"{(num_output - 1) / max(total_s - first_s, 1e-9):.1f} tok/s")
        if num_prompt is not None:
            cached = "" if num_cached is None else f" ({num_cached} cached)"
            parts.append(f"{num_prompt} prompt tokens{cached}, {num_output} output tokens")
        return f"[{', '.join([*parts, f'{total_s:.3f} s'])}]"


def _contents(line: bytes, usage: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield the texts in a line of server-sent events, as `Show` takes them; a usage in it is added to `usage`."""
    data = line.removeprefix(b"data:").strip()
    if not line.startswith(b"data:") or data == b"[DONE]":
        return
    try:
        chunk = json.loads(data)
        error = chunk["error"]["message"] if "error" in chunk else None
        usage.update(chunk.get("usage") or {})
        deltas = [] if error is not None else [choice["delta"] for choice in chunk["choices"]]
        fields = (("reasoning_content", True), ("content", False))
        texts = [(delta[name], is_reasoning) for delta in deltas for name, is_reasoning in fields if delta.get(name)]
    except (ValueError, LookupError, TypeError, AttributeError):
        text = data[:200].decode(errors="replace")
        raise MinisglError(f"The server sent an event that is not in OpenAI's format: {text}") from None
    if error is not None:
        raise MinisglError(error)
    yield from texts
