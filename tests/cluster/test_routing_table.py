"""The routing table that the request router of Ray Serve shares with the API, without a cluster."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("ray", reason="ray is not installed")

from minisgl_core.contracts.router import RouterSpec, block_keys
from minisgl_core.protocol.messages import CacheEvents, EngineInfo, Submit
from minisgl_core.sampling_params import SamplingParams
from minisgl_server.ray.request_router import HEARTBEAT_TIMEOUT_TICKS, RoutingTable
from minisgl_server.router.prefix import PrefixRouter

INFO = EngineInfo(
    model="m",
    architecture="a",
    dtype="float32",
    device="cpu",
    max_seq_len=4096,
    vocab_size=100,
    num_pages=100,
    page_size=16,
    eos_token_ids=[],
    bos_token_id=None,
    default_sampling={},
    choices=[],
    max_requests=10,
)


def submit(name: str, tokens: range = range(64), **fields: str) -> Submit:
    return Submit(request_id=name, token_ids=np.array(tokens, np.int32), sampling=SamplingParams(), **fields)


def make(num_entries: int = 3) -> RoutingTable:
    return RoutingTable(PrefixRouter(RouterSpec(num_entries, 1000)), INFO)


def route(table: RoutingTable, request: Submit, replicas: str) -> str:
    table.begin(request)
    chosen = table.choose(request.request_id, replicas.split(), replicas.split())
    assert chosen is not None
    return chosen.replica_id


def test_the_policy_sees_prompts_loads_and_events() -> None:
    table = make()
    first = route(table, submit("1"), "a b")
    assert route(table, submit("2", range(100, 164)), "a b") != first  # the other replica has no load
    assert route(table, submit("3"), "a b") == first  # it has the prefix
    for name in "123":
        table.end(name)
    keys = block_keys(np.arange(64, dtype=np.int32), 16)
    empty = np.zeros(0, np.uint64)
    other = {"a": "b", "b": "a"}[first]
    table.apply(first, CacheEvents(0, empty, keys))
    table.apply(other, CacheEvents(0, keys, empty))
    table.apply("unknown", CacheEvents(0, keys, empty))
    assert route(table, submit("4"), "a b") == other


def test_sessions_keep_their_replica() -> None:
    table = make(9)
    eight = " ".join("abcdefgh")
    sessions = [f"s{number}" for number in range(200)]

    def places(replicas: str) -> list[str]:
        found = []
        for number, session in enumerate(sessions):
            found.append(route(table, submit(f"{number}", range(number, number + 64), session_id=session), replicas))
            table.end(f"{number}")
        return found

    before = places(eight)
    assert places(eight) == before
    assert set(before) == set("abcdefgh")
    after = places(eight.removesuffix(" h"))
    assert all(old == new for old, new in zip(before, after, strict=True) if old != "h")


def test_lost_engines_get_a_new_id_and_return_requests_once() -> None:
    table = make()
    for name in "123":
        assert route(table, submit(name), "a") == "a"
    engine_id, lost = table.lose("2")
    assert sorted(each.request_id for each in lost) == ["1", "2", "3"]
    assert table.lose("3") == (-1, [])
    chosen = table.choose("2", ["a"], ["a"])
    assert chosen is not None
    assert chosen.engine_id > engine_id
    assert chosen.engine_id % 3 == engine_id % 3


def test_an_engine_without_heartbeats_is_lost_until_the_next_one() -> None:
    table = make()
    assert route(table, submit("1"), "a") == "a"
    for _ in range(HEARTBEAT_TIMEOUT_TICKS - 1):
        assert table.tick() == []
    table.heartbeat("a")
    for _ in range(HEARTBEAT_TIMEOUT_TICKS - 1):
        assert table.tick() == []
    assert [each.request_id for each in table.tick()] == ["1"]
    assert table.lose("1")[0] >= 0
    assert table.tick() == []
    assert table.choose("1", ["a"], ["a"]) is None
    assert route(table, submit("2", range(200, 264)), "a b") == "b"
    table.heartbeat("a")
    chosen = table.choose("1", ["a"], ["a"])
    assert chosen is not None
    assert chosen.replica_id == "a"


def test_an_engine_without_requests_needs_no_heartbeats() -> None:
    table = make()
    assert route(table, submit("1"), "a") == "a"
    table.end("1")
    assert [table.tick() for _ in range(2 * HEARTBEAT_TIMEOUT_TICKS)] == [[]] * (2 * HEARTBEAT_TIMEOUT_TICKS)
    assert route(table, submit("2"), "a") == "a"


def test_entries_of_ended_replicas_are_freed_after_all_requests() -> None:
    table = make(1)
    assert route(table, submit("1"), "a") == "a"
    table.begin(submit("2"))
    assert table.choose("2", ["b"], ["b"]) is None
    table.end("1")
    chosen = table.choose("2", ["b"], ["b"])
    assert chosen is not None
    assert (chosen.replica_id, chosen.engine_id) == ("b", 1)


def test_a_request_that_has_ended_is_not_routed() -> None:
    table = make()
    table.begin(submit("1"))
    table.end("1")
    assert table.choose("1", ["a"], ["a"]) is None
