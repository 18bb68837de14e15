"""Engine snapshots are exact and bounded, and are recorded only while clients request them."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import tiny

from minisgl_core.protocol.engine_snapshot import EngineSnapshot, SnapshotRequest
from minisgl_core.protocol.messages import decoder, encode
from minisgl_core.sampling_params import SamplingParams
from minisgl_core.scheduler import monitor as monitor_module
from minisgl_core.scheduler.monitor import MAX_MAPPED_PAGES, MAX_NODES, MAX_STEP_REQUESTS, MAX_STEPS, Monitor

PAGE_SIZE = 4
SYSTEM = tuple(range(3, 15))


def new_loop(**options: Any) -> Any:
    fixed = {"page_size": PAGE_SIZE, "num_pages": 400, "max_prefill_length": 200, "disable_overlap": True}
    return tiny.new_loop(**{**fixed, "cache": "radix", **options})


def submit(loop: Any, name: str, prompt: tuple[int, ...], num_tokens: int = 20) -> None:
    tiny.submit(loop, name, prompt, SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True))


def owners(state: EngineSnapshot) -> np.ndarray:
    """Return the page map, with an entry per page."""
    pages = state.pages
    ends = [*pages.map_starts[1:].tolist(), pages.num_mapped]
    return np.repeat(pages.map_owners, np.diff([*pages.map_starts.tolist()[:1], *ends]))


def check_pages(state: EngineSnapshot) -> None:
    """Check that the counts add up to the pool's size, and that the map and the tree agree with them."""
    pages, mapped = state.pages, owners(state)
    assert pages.num_free + pages.num_private + pages.num_locked + pages.num_evictable == pages.capacity
    assert len(mapped) == pages.capacity
    assert np.count_nonzero(mapped == 0) == pages.num_free
    assert np.count_nonzero(mapped < -1) == pages.num_private
    assert sum(node.num_pages for node in state.nodes) == pages.num_locked + pages.num_evictable
    for node in state.nodes:
        assert np.count_nonzero(mapped == node.node_id) == node.num_pages == node.num_tokens // PAGE_SIZE
        assert mapped[node.last_page - 1] == node.node_id
        assert node.parent_id in {0, *(each.node_id for each in state.nodes)}


def test_page_counts_during_and_after_requests() -> None:
    loop = new_loop(max_running_requests=2)
    watch = Monitor(loop.scheduler)
    empty = watch.snapshot(SnapshotRequest(worker=3))
    assert (empty.worker, empty.step, empty.num_running, empty.requests, empty.nodes) == (3, 0, 0, [], [])
    check_pages(empty)
    for place in range(3):
        submit(loop, f"r{place}", (*SYSTEM, 20 + place, 30, 31))
    loop.step()
    loop.step()
    state = watch.snapshot(SnapshotRequest(worker=0, with_tokens=True))
    check_pages(state)
    assert (state.num_running, state.num_waiting, state.step) == (2, 1, 2)
    first, second, third = state.requests
    assert [(r.number, r.is_running, r.num_prompt) for r in state.requests] == [
        (1, True, 15),
        (2, True, 15),
        (3, False, 15),
    ]
    assert (first.num_cached, first.num_output, first.num_computed) == (0, 2, 16)
    assert (second.num_cached, second.num_shared) == (12, 3)
    assert third.num_cached == -1
    [shared] = state.nodes
    assert (shared.num_tokens, shared.num_locks, shared.num_hits) == (12, 2, 1)
    assert shared.token_ids.tolist() == list(SYSTEM)
    assert shared.last_page == first.last_shared_page == second.last_shared_page
    assert first.token_ids.tolist()[:15] == [*SYSTEM, 20, 30, 31]
    assert state.has_tokens
    private = watch.snapshot(SnapshotRequest(worker=0))
    assert not private.has_tokens
    assert [len(each.token_ids) for each in (*private.nodes, *private.requests)] == [0] * 4
    assert [each.number for each in private.requests] == [1, 2, 3]
    [prefill, decode] = state.steps
    assert (prefill.step, prefill.num_decodes, prefill.num_tokens) == (1, 0, 15 + 3)
    assert (prefill.requests.tolist(), prefill.num_new.tolist()) == ([1, 2], [15, 3])
    assert (decode.step, decode.num_decodes, decode.requests.tolist(), decode.num_new.tolist()) == (
        2,
        2,
        [1, 2],
        [1, 1],
    )
    assert state.totals.num_cached_tokens == 12
    tiny.run(loop)
    end = watch.snapshot(SnapshotRequest(worker=0, since=2))
    check_pages(end)
    assert (end.num_running, end.pages.num_private, end.pages.num_locked, end.requests) == (0, 0, 0, [])
    assert [step.step for step in end.steps] == list(range(3, end.step + 1))
    assert sum(step.num_tokens for step in (*state.steps, *end.steps)) == 15 + 3 + 3 + 3 * 19
    hits = {node.num_tokens: node.num_hits for node in end.nodes if node.parent_id == 0}
    assert hits == {12: 2}
    tiny.assert_nothing_in_use(loop)


def test_a_snapshot_of_many_requests_stays_small() -> None:
    loop = new_loop(num_pages=3000, max_running_requests=256, max_prefill_length=4096)
    watch = Monitor(loop.scheduler)
    watch.snapshot(SnapshotRequest(worker=0))
    for place in range(200):
        submit(loop, f"r{place}", (*SYSTEM, 3 + place % 50, 3 + place // 50, *[5] * 8), 20)
    tiny.run(loop)
    for place in range(200):
        submit(loop, f"s{place}", (*SYSTEM, 3 + place % 50, 3 + place // 50, *[5] * 8), 20)
    loop.step()
    loop.step()
    state = watch.snapshot(SnapshotRequest(worker=0, with_tokens=True))
    assert len(state.nodes) == MAX_NODES
    assert state.steps[-1].num_tokens == 200
    assert len(state.steps[-1].requests) == MAX_STEP_REQUESTS
    data = encode(state)
    assert len(data) < 100_000
    back = decoder(EngineSnapshot | SnapshotRequest)(data)
    assert back.pages.map_owners.tolist() == state.pages.map_owners.tolist()
    assert back.steps[-1].requests.tolist() == state.steps[-1].requests.tolist()
    assert (back.nodes[5].text, back.nodes[5].token_ids.tolist()) == ("", state.nodes[5].token_ids.tolist())
    tiny.run(loop)


def test_snapshots_prefer_prefills_if_a_step_has_many_requests() -> None:
    loop = new_loop(num_pages=3000, max_running_requests=256, max_prefill_length=4096)
    watch = Monitor(loop.scheduler)
    watch.snapshot(SnapshotRequest(worker=0))
    for place in range(MAX_STEP_REQUESTS + 10):
        submit(loop, f"r{place}", (3 + place % 50, 3 + place // 50))
    loop.step()
    submit(loop, "late", tuple(range(3, 33)), 4)
    loop.step()
    step = watch.snapshot(SnapshotRequest(worker=0)).steps[-1]
    assert (step.requests[-1], step.num_new[-1]) == (MAX_STEP_REQUESTS + 11, 30)
    assert len(step.requests) == MAX_STEP_REQUESTS
    tiny.run(loop)


def test_steps_are_recorded_only_after_recent_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = new_loop()
    watch = Monitor(loop.scheduler)
    submit(loop, "a", SYSTEM)
    loop.step()
    assert loop.scheduler.step_planned is None
    assert watch.snapshot(SnapshotRequest(worker=0)).steps == []
    loop.step()
    assert loop.scheduler.step_planned is not None
    monkeypatch.setattr(monitor_module, "WATCH_S", -1.0)
    assert len(watch.snapshot(SnapshotRequest(worker=0)).steps) == 1
    loop.step()
    assert loop.scheduler.step_planned is None, "the last snapshot is too old"
    tiny.run(loop)
    assert watch.snapshot(SnapshotRequest(worker=0)).steps == []


def test_the_number_of_recorded_steps_is_bounded() -> None:
    loop = new_loop(max_seq_len_override=800)
    watch = Monitor(loop.scheduler)
    watch.snapshot(SnapshotRequest(worker=0))
    submit(loop, "a", SYSTEM, MAX_STEPS + 50)
    tiny.run(loop)
    state = watch.snapshot(SnapshotRequest(worker=0))
    assert [step.step for step in state.steps] == list(range(51, MAX_STEPS + 51))
    assert state.time_s <= time.monotonic()


def test_a_large_pool_is_mapped_in_strides() -> None:
    loop = new_loop(num_pages=5 * MAX_MAPPED_PAGES)
    watch = Monitor(loop.scheduler)
    submit(loop, "a", tuple(3 + place % 50 for place in range(40)), 4)
    loop.step()
    state = watch.snapshot(SnapshotRequest(worker=0))
    assert state.pages.stride == 8
    mapped = owners(state)
    assert len(mapped) == -(-state.pages.capacity // 8) <= MAX_MAPPED_PAGES
    [node] = state.nodes
    pages = loop.scheduler.running[0].pages
    expected = sorted((pages[pages % 8 == 1] - 1) // 8)
    assert np.flatnonzero(mapped).tolist() == expected
    assert set(mapped[expected].tolist()) <= {node.node_id, -2}
    tiny.run(loop)
