"""The trace format, and the synthetic trace compared with published statistics."""

from __future__ import annotations

import itertools
import json
from collections import OrderedDict
from pathlib import Path

import pytest
from click.testing import CliRunner

from minisgl_core.cli.main import main
from minisgl_core.errors import InvalidValueError
from minisgl_server.bench.trace.format import TraceRequest, read_trace
from minisgl_server.bench.trace.synthetic import synthetic_trace
from minisgl_server.bench.trace.trace_statistics import PUBLISHED, statistics

LRU_HIT_RATES = {256: 0.072, 1024: 0.129, 65_536: 0.318}
"""Published hit rates of trace A, by capacity in blocks."""


@pytest.fixture(scope="module")
def full() -> list[TraceRequest]:
    return list(synthetic_trace(43_058, seed=0))


def test_the_synthetic_trace_has_the_published_statistics(full: list[TraceRequest]) -> None:
    found = statistics(full)
    for name, published in PUBLISHED.items():
        if name != "reuse within 10 minutes":
            assert found[name] == pytest.approx(published, rel=0.12), name
    assert 0.8 <= found["reuse within 10 minutes"] <= 0.9, "earlier than published, as documented"


def test_lru_hit_rates(full: list[TraceRequest]) -> None:
    """Hit rates in the middle of the trace, once the cache is full."""
    for capacity, published in LRU_HIT_RATES.items():
        cache: OrderedDict[int, None] = OrderedDict()
        num_hits = num_blocks = 0
        requests = full[24_000 : 27_000 if capacity < 2000 else 30_000]
        for block in itertools.chain.from_iterable(request.hash_ids for request in requests):
            is_full = len(cache) == capacity
            num_blocks += is_full
            if block in cache:
                cache.move_to_end(block)
                num_hits += is_full
                continue
            cache[block] = None
            if is_full:
                cache.popitem(last=False)
        assert num_hits / num_blocks == pytest.approx(published, rel=0.12), capacity


def test_requests_are_well_formed(full: list[TraceRequest]) -> None:
    by_id: dict[int, TraceRequest] = {}
    for request in full[:5000]:
        assert request.chat_id == len(by_id)
        assert len(request.hash_ids) == -(-request.input_length // 16)
        assert len(set(request.hash_ids)) == len(request.hash_ids)
        if request.parent_chat_id >= 0:
            parent = by_id[request.parent_chat_id]
            assert (request.turn, request.type) == (parent.turn + 1, parent.type)
            assert request.timestamp > parent.timestamp
            whole = parent.input_length // 16
            assert request.hash_ids[:whole] == parent.hash_ids[:whole]
            assert request.input_length > parent.input_length + parent.output_length
        else:
            assert request.turn == 1
        by_id[request.chat_id] = request
    times = [request.timestamp for request in full]
    assert times == sorted(times)


def test_the_command_writes_a_readable_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    flags = ["--num-requests", "300", "--seed", "4", "--request-rate", "50", "--output-median", "20"]
    done = CliRunner().invoke(main, ["bench", "trace", "--out", str(path), *flags])
    assert done.exit_code == 0, done.output
    found = read_trace(path)
    assert len(found) == 300
    assert json.loads(path.read_text().splitlines()[0]).keys() == {
        *("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "type", "turn", "hash_ids"),
    }
    assert 300 / found[-1].timestamp == pytest.approx(50, rel=0.6)
    assert sorted(request.output_length for request in found)[150] == pytest.approx(20, rel=0.3)
    shown = CliRunner().invoke(main, ["bench", "trace", "--show", str(path)])
    assert shown.stdout == done.stdout
    assert read_trace(path, limit=7) == found[:7]


GOOD = {"chat_id": 1, "timestamp": 0.5, "input_length": 20, "output_length": 3, "hash_ids": [4, 5]}


def test_read_traces_are_sorted_and_completed(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    lines = [GOOD, GOOD | {"chat_id": 2, "timestamp": 0.1, "hash_ids": [4], "unknown": {}}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    two, one = read_trace(path)
    assert (one.chat_id, one.parent_chat_id, one.type, one.turn) == (1, -1, "text", 1)
    assert (two.chat_id, two.hash_ids) == (2, [4])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "Line 2"),
        (json.dumps(GOOD | {"input_length": 0}), "`int` >= 1"),
        (json.dumps(GOOD | {"hash_ids": [1]}), ""),
        (json.dumps(GOOD | {"hash_ids": [1, 2, 3]}), "20 tokens have 2 blocks, not 3"),
        (json.dumps(GOOD | {"hash_ids": [1, -2]}), "`int` >= 0"),
        (json.dumps({"chat_id": 1}), "Line 2"),
    ],
)
def test_invalid_lines_of_a_trace_are_refused(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{line}\n")
    if not words:
        assert len(read_trace(path)) == 2, "a last block without a hash"
        return
    with pytest.raises(InvalidValueError, match="--trace") as caught:
        read_trace(path)
    assert words in str(caught.value)


@pytest.mark.parametrize("flags", [[], ["--out", "a", "--show", "b"]])
def test_trace_needs_out_or_show(flags: list[str]) -> None:
    done = CliRunner().invoke(main, ["bench", "trace", *flags])
    assert done.exit_code == 2
    assert "--out" in done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--show", "nope"], ["--show='nope'", "No such file"]),
        (["--show", __file__, "--seed", "3"], ["--seed=3", "used with --out"]),
    ],
)
def test_an_unreadable_trace_is_named(flags: list[str], words: list[str]) -> None:
    done = CliRunner().invoke(main, ["bench", "trace", *flags])
    assert done.exit_code == 2
    assert all(word in done.stderr for word in words), done.stderr
