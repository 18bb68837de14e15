"""``GET /engine/state`` and the files of the web UI, without a browser."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import numpy as np
import pytest

from minisgl_core.plugins.plugin_filter import BLOCK_VARIABLE
from minisgl_core.protocol.engine_snapshot import (
    EngineSnapshot,
    PagesSnapshot,
    SnapshotRequest,
    StepSnapshot,
)
from minisgl_core.protocol.messages import EngineInfo
from minisgl_core.protocol.scheduler_stats import SchedulerStats
from minisgl_core.runtime.ipc import IpcAddresses, Receiver, Sender
from minisgl_server.api.app import create_app
from minisgl_server.api.engine_client import EngineClient
from minisgl_server.api.errors import ApiError
from minisgl_server.options import ServerOptions
from minisgl_server.web_ui import engine_feed
from minisgl_server.web_ui.engine_feed import EngineFeed
from minisgl_server.web_ui.routes import STATIC


def stream(http: httpx.Client, system: str, max_tokens: int = 40) -> Any:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Go on."}]
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    return http.stream("POST", "/v1/chat/completions", json=body)


def test_the_state_has_running_requests_and_cached_pages(http: httpx.Client) -> None:
    def state(since: int) -> Any:
        # The engine of a slow machine may not answer in time.
        while (answer := http.get("/engine/state", params={"since": since})).status_code == 503:
            pass
        return answer.json()

    before = state(0)
    system = "You keep the bees of the abbey, and you answer whatever the novices ask about honey, wax and smoke."
    with stream(http, system) as answer:
        lines = answer.iter_lines()
        request_id = json.loads(next(lines).removeprefix("data: "))["id"]
        states = [state(before["step"])]
        for _ in lines:
            # Polled often, so that steps are recorded on slow machines, too.
            states.append(state(states[-1]["step"]))
    while states[-1]["num_running"]:
        states.append(state(states[-1]["step"]))
    during, after = states[0], states[-1]
    [request] = [each for each in during["requests"] if each["request_id"] == f"{request_id}-0"]
    assert request["is_running"]
    assert request["num_prompt"] > 32
    steps = [step for each in states for step in each["steps"]]
    assert [step["step"] for step in steps] == list(range(before["step"] + 1, after["step"] + 1))
    own = [step for step in steps if request["number"] in step["requests"]]
    new = [step["num_new"][step["requests"].index(request["number"])] for step in own]
    assert new[0] + max(request["num_cached"], 0) == request["num_prompt"]
    assert new[1:] == [1] * 39
    for each in states:
        assert each["has_text"] is False
        assert {shown["text"] for shown in (*each["nodes"], *each["requests"])} <= {""}
        assert "token_ids" not in json.dumps(each)
    assert after["nodes"]
    assert after["totals"]["num_output_tokens"] - before["totals"]["num_output_tokens"] == 40
    for each in (before, during, after):
        pages = each["pages"]
        kinds = [pages[name] for name in ("num_free", "num_private", "num_locked", "num_evictable")]
        assert sum(kinds) == pages["capacity"] == pages["num_mapped"] == 1199
        assert len(pages["map_starts"]) == len(pages["map_owners"])


@pytest.mark.parametrize("since", ["-1", "x", "1.5", "9" * 30, "²"])
def test_an_invalid_step_number_is_refused(http: httpx.Client, since: str) -> None:
    answer = http.get("/engine/state", params={"since": since})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "since"


def test_the_page_loads_no_third_party_content(http: httpx.Client) -> None:
    page = http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    names = set(re.findall(r'(?:src|href)="([^"]+)"', page.text))
    assert names
    assert all(name.startswith("web_ui/") for name in names)
    for file in STATIC.iterdir():
        answer = http.get(f"/web_ui/{file.name}")
        assert answer.status_code == 200
        assert answer.headers["content-security-policy"] == policy
        text = re.sub(r'"http://www\.w3\.org/[^"]*"', "", file.read_text())
        assert not re.search(r"https?://|\bstyle=|<script>|onclick=|innerHTML", text), file.name
    assert http.get("/web_ui/../routes.py").status_code == 404
    assert http.get("/web_ui/nothing.js").json()["error"]["type"] == "invalid_request_error"


def step_state(step: int) -> StepSnapshot:
    one = np.ones(1, np.int32)
    return StepSnapshot(step=step, time_s=float(step), num_decodes=1, num_tokens=1, requests=one, num_new=one)


def snapshot_for(request: SnapshotRequest, last_step: int) -> EngineSnapshot:
    """Return the state of an engine without requests that has made steps."""
    pages = {name: 1 for name in PagesSnapshot.__struct_fields__ if not name.startswith("map_")}
    return EngineSnapshot(
        worker=request.worker,
        time_s=float(last_step),
        step=last_step,
        has_tokens=request.with_tokens,
        num_waiting=0,
        num_running=0,
        totals=SchedulerStats(),
        pages=PagesSnapshot(**pages, map_starts=np.zeros(1, np.int32), map_owners=np.zeros(1, np.int64)),
        requests=[],
        nodes=[],
        steps=[step_state(step) for step in range(request.since + 1, last_step + 1)],
        correlation_id=request.correlation_id,
    )


def test_viewers_share_one_poll_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    info = dict.fromkeys(("model", "architecture", "dtype", "device"), "m")
    numbers = dict.fromkeys(("max_seq_len", "vocab_size", "num_pages", "page_size", "max_requests"), 16)
    started = EngineInfo(**info, **numbers, eos_token_ids=[0], bos_token_id=None, default_sampling={}, choices=[])

    async def main() -> None:
        with (
            IpcAddresses.create() as endpoints,
            Receiver[SnapshotRequest](endpoints.tokenizer_in[0], SnapshotRequest) as requested,
            Sender(endpoints.api_in) as engine,
        ):
            client = EngineClient(endpoints)
            running = asyncio.create_task(client.run())
            feed = EngineFeed(client)
            with pytest.raises(ApiError, match="starting"):
                await feed.state(0)
            engine.send(started)
            await client.ready.wait()

            async def next_request() -> SnapshotRequest:
                request = await asyncio.to_thread(requested.receive, 20)
                assert request is not None
                return request

            viewers = [asyncio.create_task(feed.state(since)) for since in (0, 0, 2)]
            gone = asyncio.create_task(feed.state(0))
            request = await next_request()
            gone.cancel()
            engine.send(snapshot_for(request, 3))
            states = await asyncio.gather(*viewers)
            assert [[step["step"] for step in state["steps"]] for state in states] == [[1, 2, 3], [1, 2, 3], [3]]
            monkeypatch.setattr(engine_feed, "SHARED_S", 100.0)
            assert (await feed.state(3))["steps"] == []
            assert requested.receive(timeout_s=0) is None, "viewers share a recent snapshot"
            monkeypatch.setattr(engine_feed, "SHARED_S", -1.0)
            viewer = asyncio.create_task(feed.state(1))
            request = await next_request()
            assert request.since == 3, "steps are requested only once"
            engine.send(snapshot_for(request, 5))
            assert [step["step"] for step in (await viewer)["steps"]] == [2, 3, 4, 5]
            running.cancel()
            client.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def page_statuses(options: ServerOptions) -> list[int]:
    async def statuses() -> list[int]:
        with IpcAddresses.create() as endpoints:
            client = EngineClient(endpoints)
            transport = httpx.ASGITransport(create_app(client, options))
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
                found = [(await http.get(path)).status_code for path in ("/", "/web_ui/main.js", "/engine/state")]
            client.close()
            return found

    return asyncio.run(statuses())


def test_no_web_ui_flag_removes_web_ui_and_state() -> None:
    assert page_statuses(ServerOptions()) == [200, 200, 503]
    assert page_statuses(ServerOptions(web_ui=False)) == [404, 404, 404]


def test_the_web_ui_is_a_plugin_that_can_be_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BLOCK_VARIABLE, "minisgl-server:hooks:web_ui")
    assert page_statuses(ServerOptions()) == [404, 404, 404]
    assert page_statuses(ServerOptions(plugin_routes=True)) == [404, 404, 404]
