"""The API server's state of requests, which is freed on every path."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from starlette.requests import ClientDisconnect

from minisgl_core.protocol.messages import (
    Abort,
    EngineInfo,
    Logprob,
    NoReplica,
    Rejected,
    Stop,
    Text,
    TextBatch,
    Tokenize,
    TokenizerReply,
    TokenLogprobs,
)
from minisgl_core.runtime.ipc import IpcAddresses, Receiver, Sender
from minisgl_core.sampling_params import SamplingParams
from minisgl_server.api import engine_client, waiting_prompts
from minisgl_server.api.engine_client import MAX_UNSENT_BYTES, MAX_UNSENT_BYTES_PER_OUTPUT, EngineClient, Generation
from minisgl_server.api.errors import ApiError
from minisgl_server.api.openai.event_stream import EventStreamResponse, StreamEvents, event

INFO = EngineInfo(
    model="m",
    architecture="a",
    dtype="float32",
    device="cpu",
    max_seq_len=64,
    vocab_size=10,
    num_pages=4,
    page_size=16,
    eos_token_ids=[0],
    bos_token_id=None,
    default_sampling={},
    choices=[],
    max_requests=8,
)


class Engine:
    """The other end of the sockets, controlled by a test."""

    def __init__(self, endpoints: IpcAddresses) -> None:
        self._inboxes = [Receiver[Any](address, Tokenize | Abort) for address in endpoints.tokenizer_in]
        self._to_api = Sender(endpoints.api_in)

    async def received(self, num: int) -> list[Any]:
        """Return the next `num` messages."""
        messages: list[Any] = []
        while len(messages) < num:
            messages += [message for inbox in self._inboxes for message in inbox.drain()]
            await asyncio.sleep(0.001)
        return messages

    def nothing_received(self) -> bool:
        return not any(inbox.receive(timeout_s=0.05) for inbox in self._inboxes)

    def send(self, message: Any) -> None:
        self._to_api.send(message)

    def text(self, request_id: str, text: str, finish_reason: str | None = None) -> None:
        self.send(TextBatch([Text(request_id=request_id, text=text, token_ids=[1], finish_reason=finish_reason)]))

    def close(self) -> None:
        for each in (*self._inboxes, self._to_api):
            each.close()


def run(test: Callable[[EngineClient, Engine], Awaitable[None]]) -> None:
    async def main() -> None:
        with IpcAddresses.create(num_tokenizers=2) as endpoints:
            client, engine = EngineClient(endpoints), Engine(endpoints)
            task = asyncio.create_task(client.run())
            try:
                async with asyncio.timeout(30):
                    await test(client, engine)
                assert not client._routes
            finally:
                task.cancel()
                client.close()
                engine.close()

    asyncio.run(main())


async def connected() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


def start(client: EngineClient, *names: str, receive: Any = connected) -> Generation:
    return client.start([Tokenize(request_id=n, text="x", sampling=SamplingParams()) for n in names], receive)


def test_output_reaches_its_request_and_state_is_freed() -> None:
    async def test(client: EngineClient, engine: Engine) -> None:
        both, other = start(client, "a", "b"), start(client, "c")
        assert sorted(message.request_id for message in await engine.received(3)) == ["a", "b", "c"]
        engine.text("c", "C", "stop")
        engine.text("b", "B", "length")
        engine.text("a", "A")
        engine.text("a", "AA", "stop")
        engine.text("a", "too late")
        engine.text("stranger", "?")
        assert [(place, text.text) for place, text in await other.next()] == [(0, "C")]
        assert await other.next() == []
        pieces: list[tuple[int, str]] = []
        while got := await both.next():
            pieces += [(place, text.text) for place, text in got]
        assert pieces == [(1, "B"), (0, "A"), (0, "AA")]
        both.close()
        other.close()
        assert engine.nothing_received(), "finished requests are not aborted"

    run(test)


def test_closing_aborts_running_requests() -> None:
    async def test(client: EngineClient, engine: Engine) -> None:
        generation = start(client, "a", "b")
        await engine.received(2)
        engine.text("a", "A", "stop")
        await generation.next()
        generation.close()
        generation.close()
        assert await engine.received(1) == [Abort("b")]

    run(test)


def test_a_client_disconnect_ends_the_generation() -> None:
    async def test(client: EngineClient, engine: Engine) -> None:
        gone = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await gone.wait()
            return {"type": "http.disconnect"}

        generation = start(client, "a", receive=receive)
        await engine.received(1)
        gone.set()
        with pytest.raises(ClientDisconnect):
            await generation.next()
        assert await engine.received(1) == [Abort("a")]

    run(test)


@pytest.mark.parametrize(
    ("kind", "status"), [("invalid", 400), ("too_long", 400), ("queue_full", 429), ("internal", 500)]
)
def test_a_rejection_ends_all_outputs_of_a_request(kind: str, status: int) -> None:
    async def test(client: EngineClient, engine: Engine) -> None:
        generation = start(client, "a", "b")
        await engine.received(2)
        engine.send(Rejected(request_id="b", kind=kind, message="no", param="prompt"))
        with pytest.raises(ApiError) as caught:
            await generation.next()
        assert caught.value.status == status
        assert await engine.received(1) == [Abort("a")]
        engine.send(Rejected(request_id="a", kind=kind, message="late"))
        engine.text("a", "late", "abort")
        await asyncio.sleep(0.05)

    run(test)


def test_an_engine_that_stops_fails_all_requests() -> None:
    async def test(client: EngineClient, engine: Engine) -> None:
        engine.send(INFO)
        await client.ready.wait()
        assert client.ready_info() == INFO
        generation = start(client, "a", "b")
        state = asyncio.create_task(client.snapshot(0))
        await asyncio.sleep(0)
        engine.send(Stop())
        with pytest.raises(ApiError, match="stopped"):
            await state
        with pytest.raises(ApiError, match="stopped"):
            await generation.next()
        with pytest.raises(ApiError) as caught:
            client.ready_info()
        assert (caught.value.status, caught.value.code) == (503, "engine_stopped")

    run(test)


def test_an_unreadable_message_fails_all_requests(caplog: pytest.LogCaptureFixture) -> None:
    """The server also stops, instead of letting requests wait forever."""

    async def test(client: EngineClient, engine: Engine) -> None:
        generation = start(client, "a")
        engine._to_api.socket.send(b"no message")
        with pytest.raises(ApiError, match="failed on this request"):
            await generation.next()
        assert client.stopped.is_set()

    run(test)
    assert "cannot read a message" in caplog.text


def test_a_request_that_cannot_be_encoded_leaves_no_state() -> None:
    async def test(client: EngineClient, engine: Engine) -> None:
        good = Tokenize(request_id="a", text="x", sampling=SamplingParams())
        for value in (10**40, "\ud800"):
            bad = Tokenize(request_id="b", text="x", sampling=SamplingParams(), chat_template_kwargs={"x": value})
            with pytest.raises(ApiError) as caught:
                client.start([good, bad], connected)
            assert caught.value.status == 400

    run(test)


@pytest.mark.parametrize("end", ["output", "rejection", "close", "failure"])
def test_large_prompts_are_refused_if_too_many_bytes_wait(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_prompts, "MAX_WAITING_BYTES", 3000)
    monkeypatch.setattr(waiting_prompts, "GUARANTEED_BYTES", 2000)

    def prompt(name: str, num_chars: int, **fields: Any) -> Tokenize:
        return Tokenize(request_id=name, text="x" * num_chars, sampling=SamplingParams(), **fields)

    async def test(client: EngineClient, engine: Engine) -> None:
        both = client.start([prompt("short", 10), prompt("long", 4000, sibling_ids=["long-1"])], connected)
        with pytest.raises(ApiError) as caught:
            client.start([prompt("a", 1000), prompt("b", 1000)], connected)
        assert (caught.value.status, caught.value.code) == (429, "too_many_requests")
        assert len(client._routes) == 3, "what was refused leaves no state"
        client.start([prompt("small", 1000)], connected).close()
        engine.text("short", "x")
        await both.next()
        with pytest.raises(ApiError):
            client.start([prompt("a", 2000)], connected)
        if end == "output":
            engine.text("long", "x")
            await both.next()
        elif end == "rejection":
            engine.send(Rejected(request_id="long", kind="invalid", message="no"))
            with pytest.raises(ApiError, match="no"):
                await both.next()
        elif end == "failure":
            both.fail(ClientDisconnect())
        else:
            both.close()
        client.start([prompt("a", 2000)], connected).close()
        both.close()

    run(test)


def test_bytes_of_a_query_count_until_its_response(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_prompts, "MAX_WAITING_BYTES", 3000)
    monkeypatch.setattr(waiting_prompts, "GUARANTEED_BYTES", 2000)

    async def test(client: EngineClient, engine: Engine) -> None:
        def ask(name: str) -> asyncio.Task[TokenizerReply]:
            query = Tokenize(request_id=name, text="x" * 4000, sampling=SamplingParams(), only_tokens=True)
            return asyncio.create_task(client.query(query, connected))

        first = ask("a")
        await engine.received(1)
        with pytest.raises(ApiError, match="waiting prompts have"):
            await ask("b")
        engine.send(TokenizerReply(request_id="a", token_ids=[1], token_names=["x"], text=""))
        await first
        second = ask("c")
        await engine.received(1)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        third = ask("d")
        await engine.received(1)
        engine.send(TokenizerReply(request_id="d", token_ids=[1], token_names=["x"], text=""))
        await third

    run(test)


def test_requests_are_refused_until_a_replica_is_ready_again() -> None:
    async def test(client: EngineClient, engine: Engine) -> None:
        engine.send(INFO)
        await client.ready.wait()
        engine.send(NoReplica(3.2))
        while client.no_replica is None:
            await asyncio.sleep(0.001)
        for check in (client.ready_info, client.check_replicas):
            with pytest.raises(ApiError) as found:
                check()
            assert (found.value.status, found.value.code) == (503, "no_replica")
            assert found.value.headers["Retry-After"] == "4"
        engine.send(INFO)
        while client.no_replica is not None:
            await asyncio.sleep(0.001)
        assert client.ready_info() == INFO

    run(test)


def test_unread_output_is_limited() -> None:
    """A stream whose client does not read is aborted with an error. Other streams continue."""

    class Events(StreamEvents):
        def output(self, index: int, text: Text) -> bytes:
            return event(text.text)

    async def test(client: EngineClient, engine: Engine) -> None:
        can_send = asyncio.Event()
        sent: list[bytes] = []

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message.get("body", b""))
            if len(sent) > 1:  # the first message has the headers
                await can_send.wait()

        stalled, running = start(client, "a"), start(client, "b")
        await engine.received(2)
        engine.text("a", "first")
        choices: Any = SimpleNamespace(
            generation=stalled, first=await stalled.next(), count_tokens=lambda outputs: outputs
        )
        response = asyncio.create_task(EventStreamResponse(choices, Events())({"type": "http"}, connected, send))
        num_texts = MAX_UNSENT_BYTES // 5000 + 1
        for number in range(num_texts):
            engine.text("a", "x" * 5000)
            engine.text("b", "y" * 5000, "stop" if number == num_texts - 1 else None)
        assert await engine.received(1) == [Abort("a")]
        assert not response.done()
        can_send.set()
        await response
        assert sent[1] == event("first")
        assert json.loads(sent[-1].removeprefix(b"data: "))["error"]["code"] == "slow_client"
        num_read = 0
        while got := await running.next():
            num_read += len(got)
        assert num_read == num_texts, "output is not limited while nothing is being sent"
        running.close()

    run(test)


@pytest.mark.parametrize("what", ["headers", "prompt_logprobs", "prompt_token_ids", "prompt_text"])
def test_all_unread_bytes_of_a_client_count(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers wait while an earlier response on the connection is unread. Each output with `echo` has its prompt."""
    monkeypatch.setattr(engine_client, "MAX_UNSENT_PROMPT_BYTES", MAX_UNSENT_BYTES)

    class Events(StreamEvents):
        def output(self, index: int, text: Text) -> bytes:
            return b"x"

    top = [Logprob(token, -1.0, 1) for token in range(20)]
    fields: dict[str, Any] = {
        "headers": {"text": "x" * 5000},
        "prompt_logprobs": {"prompt_logprobs": [None, *[TokenLogprobs(top[0], top)] * 9]},
        "prompt_token_ids": {"prompt_token_ids": list(range(500))},
        "prompt_text": {"prompt_text": "x" * 10_000},
    }

    async def test(client: EngineClient, engine: Engine) -> None:
        can_send = asyncio.Event()
        waits = asyncio.Event()

        async def send(message: MutableMapping[str, Any]) -> None:
            if (what == "headers") == (message["type"] == "http.response.start"):
                waits.set()
                await can_send.wait()

        names = ["a", "b"]
        generation = start(client, *names)
        await engine.received(2)
        engine.text("a", "first")
        choices: Any = SimpleNamespace(
            generation=generation, first=await generation.next(), count_tokens=lambda outputs: outputs
        )
        response = asyncio.create_task(EventStreamResponse(choices, Events())({"type": "http"}, connected, send))
        await waits.wait()
        for _ in range((MAX_UNSENT_BYTES + MAX_UNSENT_BYTES_PER_OUTPUT) // 5000):
            engine.send(TextBatch([Text(**{"request_id": "b", "text": "", "token_ids": [], **fields[what]})]))
        assert sorted(each.request_id for each in await engine.received(2)) == names
        can_send.set()
        await response

    run(test)


def test_prompt_logprobs_do_not_count_as_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """All log-probabilities of a prompt arrive while the first of them are being sent."""
    monkeypatch.setattr(engine_client, "MAX_UNSENT_PROMPT_BYTES", 0)

    async def test(client: EngineClient, engine: Engine) -> None:
        client.info = msgspec.structs.replace(INFO, max_seq_len=2**14)
        generation = start(client, "a")
        await engine.received(1)
        generation.is_sending = True
        top = [Logprob(token, -1.0, 1) for token in range(20)]
        position = TokenLogprobs(top[0], top)
        for _ in range(2**4):
            engine.send(TextBatch([Text(request_id="a", text="", token_ids=[], prompt_logprobs=[position] * 2**10)]))
        engine.text("a", "x", "stop")
        while generation._running:
            await asyncio.sleep(0.01)
        assert len(await generation.next()) == 2**4 + 1
        generation.close()

    run(test)


def test_a_drain_waits_for_queries() -> None:
    async def test(client: EngineClient, engine: Engine) -> None:
        query = asyncio.create_task(
            client.query(Tokenize(request_id="t", text="x", sampling=SamplingParams(), only_tokens=True), connected)
        )
        await engine.received(1)
        drain = asyncio.create_task(client.drain(20))
        await asyncio.sleep(0.1)
        assert not query.done()
        engine.send(TokenizerReply(request_id="t", token_ids=[1], token_names=["x"], text=""))
        assert (await query).token_ids == [1]
        await drain

    run(test)


def test_queries_of_disconnected_clients_are_aborted() -> None:
    """Clients that send long texts and disconnect must not keep the tokenizer workers busy."""

    async def test(client: EngineClient, engine: Engine) -> None:
        leaves = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await leaves.wait()
            return {"type": "http.disconnect"}

        message = Tokenize(request_id="t", text="x", sampling=SamplingParams(), only_tokens=True)
        query = asyncio.create_task(client.query(message, receive))
        await engine.received(1)
        leaves.set()
        with pytest.raises(ClientDisconnect):
            await query
        assert await engine.received(1) == [Abort("t")]
        await asyncio.sleep(0)
        assert not client._pending_queries

    run(test)
