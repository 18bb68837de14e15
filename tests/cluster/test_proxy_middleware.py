"""The middleware of Ray Serve's proxies, without a cluster: an application replaces the proxy."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="ray is not installed")

from ray.serve import context
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl_server.ray import proxy_middleware
from minisgl_server.ray.proxy_middleware import ProxyMiddleware

CHUNK = {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True}
LAST = {"type": "http.response.body", "body": b"data: [DONE]\n\n"}


@pytest.fixture(autouse=True)
def head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cluster head that responds."""
    monkeypatch.setattr(proxy_middleware.ray, "nodes", list)
    monkeypatch.setattr(proxy_middleware, "POLL_S", 0.01)


def start(content_type: str = "text/event-stream; charset=utf-8", status: int = 200) -> Message:
    headers = [(b"content-type", content_type.encode())]
    return {"type": "http.response.start", "status": status, "headers": headers}


def proxy(messages: Sequence[Message], application: str = "minisgl", *, waits: bool = False) -> ASGIApp:
    """Return a proxy that sends the messages for a request to `application`, and then returns or waits."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        context._serve_request_context.set(context._RequestContext(app_name=application))
        await asyncio.create_task(receive())  # as Serve does, before the replica responds
        for message in messages:
            await send(message)
        while waits:
            await asyncio.sleep(1)

    return app


async def response_to(app: ASGIApp, path: str = "/v1/completions", root_path: str = "") -> list[Message]:
    """Return the messages that the client gets until the response is complete or interrupted."""
    sent: list[Message] = []
    is_complete = asyncio.Event()

    async def send(message: Message) -> None:
        sent.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            is_complete.set()

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "path": root_path + path, "root_path": root_path, "headers": []}
    call = asyncio.create_task(ProxyMiddleware(app)(scope, receive, send))
    complete = asyncio.create_task(is_complete.wait())
    await asyncio.wait([call, complete], return_when=asyncio.FIRST_COMPLETED, timeout=10)
    for each in (call, complete):
        each.cancel()
    return sent


def parse_event(message: Message) -> Any:
    assert not message.get("more_body")
    [line] = [line for line in message["body"].decode().splitlines() if line.startswith("data: ")]
    return json.loads(line.removeprefix("data: "))


async def test_interrupted_streams_end_with_an_error() -> None:
    *before, last = await response_to(proxy([start(), CHUNK]))
    assert before == [start(), CHUNK]
    assert parse_event(last)["error"]["code"] == "replica_lost"


@pytest.mark.parametrize("root_path", ["", "/llm"])
async def test_the_error_has_the_format_of_the_path(root_path: str) -> None:
    cut = proxy([start(), CHUNK])
    error = (await response_to(cut, "/v1/messages", root_path))[-1]
    assert error["body"].startswith(b"event: error\n")
    assert parse_event(error)["error"]["type"] == "overloaded_error"
    several = CHUNK | {"body": b"event: a\ndata: 2\n\nevent: a\ndata: 3\n\n"}
    error = (await response_to(proxy([start(), CHUNK, several]), "/v1/responses", root_path))[-1]
    assert error["body"].startswith(b"event: error\n")
    assert (parse_event(error)["code"], parse_event(error)["sequence_number"]) == ("replica_lost", 3)


@pytest.mark.parametrize("messages", [[], [start("text/plain", 503), {**LAST, "body": b"Deployment is unavailable."}]])
async def test_requests_without_a_response_get_status_503(messages: list[Message]) -> None:
    first, body = await response_to(proxy(messages))
    assert first["status"] == 503
    assert (b"retry-after", b"1") in first["headers"]
    assert json.loads(body["body"])["error"]["code"] == "replica_lost"


@pytest.mark.parametrize(
    "messages", [[start(), CHUNK, LAST], [start("application/json", 500), LAST], [start("text/plain"), LAST]]
)
async def test_complete_responses_are_unchanged(messages: list[Message]) -> None:
    assert await response_to(proxy(messages)) == messages


async def test_only_the_request_id_of_the_api_is_returned() -> None:
    """Serve's proxy appends the client's id, which the API may have refused."""
    both = {**start(), "headers": [*start()["headers"], (b"x-request-id", b"new"), (b"x-request-id", b"sent")]}
    first, *_ = await response_to(proxy([both, CHUNK, LAST]))
    assert first["headers"] == [*start()["headers"], (b"x-request-id", b"new")]


@pytest.mark.parametrize("messages", [[], [start(), CHUNK], [start("text/plain", 503), LAST]])
async def test_responses_of_other_applications_are_unchanged(messages: list[Message]) -> None:
    assert await response_to(proxy(messages, "another")) == messages


async def test_responses_end_when_the_head_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_middleware.ray, "nodes", lambda: time.sleep(1))
    monkeypatch.setattr(proxy_middleware, "HEAD_S", 0.1)
    *before, last = await response_to(proxy([start(), CHUNK], waits=True))
    assert before == [start(), CHUNK]
    assert parse_event(last)["error"]["code"] == "engine_stopped"
    first, _ = await response_to(proxy([], waits=True))
    assert first["status"] == 500


async def test_a_responsive_head_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_middleware, "HEAD_S", 0.1)

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await proxy([start(), CHUNK])(scope, receive, send)
        await asyncio.sleep(0.5)
        await send(LAST)

    assert await response_to(slow) == [start(), CHUNK, LAST]


async def test_a_lost_head_fails_all_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_middleware, "HEAD_S", -1.0)
    middleware = ProxyMiddleware(proxy([]))
    failed: list[str] = []

    async def fail(error: Any) -> None:
        failed.append(error.code)
        raise OSError("the client is gone")

    middleware._responses = {number: SimpleNamespace(fail=fail) for number in range(2)}  # type: ignore[misc]
    watch = asyncio.create_task(middleware._watch_head())
    while len(failed) < 4:  # the watch continues
        assert not watch.done()
        await asyncio.sleep(0.01)
    watch.cancel()
