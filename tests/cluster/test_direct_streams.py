"""Event streams from the API to a proxy, without a cluster: an application replaces Ray FakeServe between them."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import AsyncIterator

import pytest

pytest.importorskip("ray", reason="ray is not installed")

from ray.serve import context
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl_server.ray import direct_streams, proxy_middleware
from minisgl_server.ray.connections import Connections
from minisgl_server.ray.direct_streams import Chunks, DirectStreams
from minisgl_server.ray.proxy_middleware import ProxyMiddleware

DEADLINE_S = 20.0
START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
EVENTS = [b"data: %d\n\n" % number for number in range(100)]


@pytest.fixture(autouse=True)
def head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cluster head that responds."""
    monkeypatch.setattr(proxy_middleware.ray, "nodes", list)


@pytest.fixture
async def proxies() -> AsyncIterator[Connections]:
    """Connections of the API to proxies."""
    made = Connections()
    yield made
    for sender in made.senders():
        sender.drop()


async def api(scope: Scope, receive: Receive, send: Send) -> None:
    """Send the events, each in its own iteration of the event loop."""
    await send(START)
    for event in EVENTS:
        await send({"type": "http.response.body", "body": event, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


class Client:
    """Client of the proxy; `body` is what it has received, `num_late` the number of messages after the last one."""

    def __init__(self) -> None:
        self.body, self.is_complete, self.num_late = b"", False, 0
        self.reads = asyncio.Event()
        self.reads.set()

    async def send(self, message: Message) -> None:
        await self.reads.wait()
        if message["type"] == "http.response.start":
            assert message == START
        else:
            self.num_late += self.is_complete
            self.body += message["body"]
            self.is_complete = not message.get("more_body", False)

    async def receive(self) -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    def error_code(self) -> str:
        """Return the code of the error in the last event."""
        return str(json.loads(self.body.splitlines()[-2].removeprefix(b"data: "))["error"]["code"])


class FakeServe:
    """Calls the API for the proxy, and records in `passed` the messages of the call."""

    def __init__(self, app: ASGIApp) -> None:
        self.app, self.passed = app, list[Message]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context._serve_request_context.set(context._RequestContext(app_name="minisgl"))

        async def send_copy(message: Message) -> None:
            copy = pickle.loads(pickle.dumps(message))
            self.passed.append(dict(copy))
            await send(copy)

        await self.app(pickle.loads(pickle.dumps(scope)), receive, send_copy)


async def call(proxy: ProxyMiddleware, client: Client) -> None:
    scope = {"type": "http", "path": "/v1/completions", "headers": []}
    await asyncio.wait_for(asyncio.create_task(proxy(scope, client.receive, client.send)), DEADLINE_S)


async def test_events_do_not_pass_through_serve(proxies: Connections) -> None:
    serve, clients = FakeServe(DirectStreams(api, proxies)), [Client() for _ in range(20)]
    proxy = ProxyMiddleware(serve)
    await asyncio.gather(*(call(proxy, client) for client in clients))
    assert {client.body for client in clients} == {b"".join(EVENTS) + b"data: [DONE]\n\n"}
    assert all(client.is_complete and not client.num_late for client in clients)
    assert len(serve.passed) == 2 * len(clients)
    assert not any(message.get("body") for message in serve.passed)
    assert len(proxies.senders()) == 1


async def test_events_pass_through_serve_without_the_proxy_middleware(proxies: Connections) -> None:
    serve, client = FakeServe(DirectStreams(api, proxies)), Client()
    await serve({"type": "http", "headers": []}, client.receive, client.send)
    assert client.body == b"".join(EVENTS) + b"data: [DONE]\n\n"
    assert not proxies.senders()


async def test_other_responses_pass_through_serve(proxies: Connections) -> None:
    messages = [{**START, "headers": [(b"content-type", b"application/json")]}, {"type": "http.response.body"}]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    proxy = ProxyMiddleware(FakeServe(DirectStreams(app, proxies)))
    await proxy({"type": "http", "path": "/", "headers": []}, Client().receive, send)
    assert sent == messages


async def test_calls_end_after_their_events(proxies: Connections, monkeypatch: pytest.MonkeyPatch) -> None:
    flush = DirectStreams._flush

    def flush_late(streams: DirectStreams) -> None:
        asyncio.get_running_loop().call_later(0.5, flush, streams)

    monkeypatch.setattr(DirectStreams, "_flush", flush_late)
    client = Client()
    await call(ProxyMiddleware(FakeServe(DirectStreams(api, proxies))), client)
    assert client.body == b"".join(EVENTS) + b"data: [DONE]\n\n"


@pytest.mark.parametrize("lost", [0, 50, len(EVENTS)])
async def test_a_lost_chunk_ends_the_stream_with_an_error(
    proxies: Connections, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    monkeypatch.setattr(proxy_middleware, "LAST_CHUNK_S", 0.5)
    encode = direct_streams.Chunks

    def without_lost(chunks: list[direct_streams.Chunk]) -> Chunks:
        return encode([each for each in chunks if each.index != lost])

    monkeypatch.setattr(direct_streams, "Chunks", without_lost)
    client = Client()
    await call(ProxyMiddleware(FakeServe(DirectStreams(api, proxies))), client)
    assert client.error_code() == "replica_lost"
    assert client.is_complete
    before, _, _ = client.body.partition(b"data: {")
    assert b"".join(EVENTS[:lost]).startswith(before)


async def test_a_lost_api_ends_the_stream_with_an_error(proxies: Connections) -> None:
    client, has_events = Client(), asyncio.Event()

    async def lost(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send({"type": "http.response.body", "body": EVENTS[0], "more_body": True})
        while not client.body:
            await asyncio.sleep(0.01)
        has_events.set()

    await call(ProxyMiddleware(FakeServe(DirectStreams(lost, proxies))), client)
    assert has_events.is_set()
    assert client.body.startswith(EVENTS[0])
    assert client.error_code() == "replica_lost"


async def test_events_after_a_lost_head_are_dropped(proxies: Connections, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_middleware, "POLL_S", 0.01)
    monkeypatch.setattr(proxy_middleware, "HEAD_S", -1.0)
    client = Client()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        while not client.is_complete:
            await asyncio.sleep(0.01)
        await api(scope, receive, send)

    await call(ProxyMiddleware(FakeServe(DirectStreams(app, proxies))), client)
    assert client.error_code() == "engine_stopped"
    assert client.num_late == 0


async def test_requests_of_clients_that_do_not_read_end(proxies: Connections) -> None:
    client, was_cancelled = Client(), False
    chunk = {"type": "http.response.body", "body": bytes(2**20), "more_body": True}

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal was_cancelled
        await send(START)
        client.reads.clear()
        try:
            while True:
                await send(chunk)
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            was_cancelled = True
            client.reads.set()
            raise

    await call(ProxyMiddleware(FakeServe(DirectStreams(endless, proxies))), client)
    assert was_cancelled
    assert client.error_code() == "slow_client"


async def test_idle_connections_are_closed(proxies: Connections, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl_server.ray.connections.IDLE_S", 0.0)
    proxy = ProxyMiddleware(FakeServe(DirectStreams(api, proxies)))
    for _ in range(2):
        client = Client()
        await call(proxy, client)
        assert client.is_complete
        proxies.close_idle()
        assert not proxies.senders()
