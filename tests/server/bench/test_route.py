"""The simulator of routers, compared with the radix cache, a naive prefix search and measured times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from minisgl_backends.prefix_cache.radix import RadixPrefixCache
from minisgl_core.cli.main import main
from minisgl_core.contracts.router import Router
from minisgl_core.errors import InvalidValueError
from minisgl_core.plugins.registry import Registry
from minisgl_server.bench.route.replica import replica_limits
from minisgl_server.bench.route.requests import SimulatedRequest, chat_trace, num_distinct_blocks, simulated_requests
from minisgl_server.bench.route.simulation import Setup, Simulation
from minisgl_server.bench.route.step_time import StepTime
from minisgl_server.bench.trace.format import TraceRequest, read_trace, write_trace
from minisgl_server.bench.trace.synthetic import synthetic_trace
from minisgl_server.bench.workloads import mixed

ROUTERS = ["round-robin", "least-loaded", "prefix"]


def router(name: str) -> type[Router]:
    found: type[Router] = Registry.from_environment().load("router", name)
    return found


def chats(num_requests: int = 240, request_rate: float = 40, seed: int = 0) -> list[TraceRequest]:
    options = SimpleNamespace(
        num_requests=num_requests,
        num_turns=4,
        num_prefixes=12,
        shared_prefix_tokens=512,
        input_len=64,
        output_len=48,
        request_rate=request_rate,
        turn_delay=2,
        seed=seed,
    )
    return chat_trace(options)


def setup(name: str = "prefix", num: int = 4, num_pages: int = 2000, **options: Any) -> Setup:
    options = {"cache": RadixPrefixCache} | options
    limits = replica_limits(num_pages)
    return Setup(num_replicas=num, limits=limits, step_time=StepTime(), router=router(name), **options)


def run(made: Setup, trace: list[TraceRequest]) -> Simulation:
    outcome = Simulation(made, len(trace)).run(simulated_requests(trace))
    assert outcome.num_ended == len(trace)
    assert outcome.num_prompt_tokens == sum(each.input_length for each in trace)
    assert outcome.num_output_tokens == sum(each.output_length for each in trace)
    assert np.isfinite(outcome.ttft_s).all()
    return outcome


def simulated(outcome: Simulation) -> tuple[Any, ...]:
    times = outcome.ttft_s.tolist(), outcome.tpot_s.tolist(), outcome.now_s
    return *times, outcome.num_cached_tokens, outcome.num_routed, outcome.router_stats


@pytest.mark.parametrize("cache", [RadixPrefixCache, None])
def test_a_seed_gives_one_result(cache: Any) -> None:
    first, again, other = (simulated(run(setup(cache=cache), chats(80, seed=seed))) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_a_later_turn_begins_with_the_sequence_before_it() -> None:
    for trace in (chats(60), list(synthetic_trace(300, seed=1))):
        by_id = dict(zip((each.chat_id for each in trace), simulated_requests(trace), strict=True))
        later = [each for each in trace if each.parent_chat_id >= 0]
        assert later
        for each in later:
            before, after = by_id[each.parent_chat_id].sequence, by_id[each.chat_id].prompt
            whole = min(len(before), len(after)) // 16 * 16
            assert (before[:whole] == after[:whole]).all()


def far_apart(trace: list[TraceRequest]) -> list[TraceRequest]:
    """Return the same requests with arrivals after the end of the previous request."""
    return [TraceRequest(**{**as_dict(each), "timestamp": 100.0 * index}) for index, each in enumerate(trace)]


def as_dict(request: TraceRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__struct_fields__}


@pytest.mark.parametrize("num_pages", [150, 400, 20_000])
def test_hits_of_one_replica_equal_those_of_its_radix_cache(num_pages: int) -> None:
    trace = far_apart(chats(100))
    cache, free, num_cached = RadixPrefixCache(16), list(range(1, num_pages + 1)), 0
    for request in simulated_requests(trace):
        known = request.sequence[:-1]  # the KV of the last token is not cached
        num_usable = min(len(cache.match(request.prompt).pages), (request.num_prompt - 1) // 16)
        match = cache.match(known[: num_usable * 16])
        num_cached += num_usable * 16
        cache.lock(match.handle)
        num_new = -(-len(known) // 16) - num_usable
        if num_new > len(free):
            free += cache.evict(num_new - len(free)).tolist()
        own, free = free[:num_new], free[num_new:]
        inserted = cache.insert(known, np.array([*match.pages, *own], np.int32))
        cache.unlock(match.handle)
        free += own[: inserted.num_present - num_usable] + own[len(inserted.pages) - num_usable :]
    for model in (RadixPrefixCache, None):
        outcome = run(setup("round-robin", 1, num_pages, cache=model), trace)
        assert outcome.num_cached_tokens == num_cached
    if num_pages == 20_000:
        assert num_cached == sum(longest_earlier_prefixes(list(simulated_requests(trace))))


def longest_earlier_prefixes(requests: list[SimulatedRequest]) -> list[int]:
    """Return the number of tokens in whole pages that each prompt shares with an earlier sequence, by comparing all pairs."""
    found = []
    for index, request in enumerate(requests):
        shared = [0]
        for earlier in requests[:index]:
            size = min(request.num_prompt - 1, len(earlier.sequence) - 1)
            differs = np.flatnonzero(request.sequence[:size] != earlier.sequence[:size])
            shared.append((int(differs[0]) if len(differs) else size) // 16 * 16)
        found.append(max(shared))
    return found


def test_prefix_router_beats_round_robin() -> None:
    trace = chats(400)
    num_pages = round(num_distinct_blocks(trace) / (0.667 * 4))
    rates = {name: run(setup(name, num_pages=num_pages), trace).hit_rate for name in ("round-robin", "prefix")}
    one = run(replace(setup("round-robin", 1, 4 * num_pages), step_time=StepTime(speed=4)), trace).hit_rate
    assert rates["prefix"] > 1.2 * rates["round-robin"]
    assert rates["prefix"] >= 0.9 * one


@pytest.mark.parametrize(
    ("name", "num_pages", "request_rate"),
    [*((name, 3000, 40) for name in ROUTERS), ("prefix", 300, 40), ("prefix", 300, 400)],
)
def test_the_simple_model_equals_the_scheduler(name: str, num_pages: int, request_rate: float) -> None:
    """If pages are few, requests wait: the simple model reserves more pages, and the scheduler preempts."""
    trace = chats(300, request_rate)
    real, simple = (run(setup(name, 4, num_pages, cache=cache), trace) for cache in (RadixPrefixCache, None))
    assert simple.hit_rate == pytest.approx(real.hit_rate, abs=0.04)
    assert simple.now_s == pytest.approx(real.now_s, rel=0.05)
    if request_rate == 40:
        for percent in (50, 99):
            times = [np.percentile(each.ttft_s, percent) for each in (real, simple)]
            assert times[1] == pytest.approx(times[0], rel=0.25)


def test_simulated_times_equal_measured_times() -> None:
    """Workload W on one H200, and arrivals at two rates (docs/benchmarks.md). Its higher rates have fewer requests."""

    def one(requests: list[SimulatedRequest]) -> Simulation:
        return Simulation(setup("round-robin", 1, 40_000, cache=None), len(requests)).run(requests)

    w = mixed(256, 150_000)
    sequences = [np.array(prompt + [1] * size, np.int32) for prompt, size in zip(w.prompts, w.output_lens, strict=True)]
    whole = one([SimulatedRequest(i, 0.0, each, len(w.prompts[i])) for i, each in enumerate(sequences)])
    assert whole.now_s == pytest.approx(w.num_output_tokens / 6643, rel=0.06)
    rows = json.loads((Path(__file__).parents[3] / "docs/data/online.json").read_text())["rows"]
    for row in rows[:2]:
        rng, requests, now_s = np.random.default_rng(row["requests_per_s"]), [], 0.0
        for number in range(120 * row["requests_per_s"]):
            now_s += rng.exponential(1 / row["requests_per_s"])
            num_prompt, num_output = rng.integers((256, 128), (769, 385)).tolist()
            sequence = rng.integers(0, 2**30, num_prompt + num_output).astype(np.int32)
            requests.append(SimulatedRequest(number, now_s, sequence, num_prompt))
        found, measured = one(requests), row["minisgl"]
        assert np.median(found.tpot_s) * 1e3 == pytest.approx(measured["tpot_ms"][0], rel=0.06)
        assert np.percentile(found.tpot_s, 99) * 1e3 == pytest.approx(measured["tpot_ms"][-1], rel=0.12)
        missing_ms = measured["ttft_ms"][0] - np.median(found.ttft_s) * 1e3
        assert 5 < missing_ms < 25, "the time of HTTP, tokenizer and client is not simulated"


def invoke(*flags: str) -> Any:
    return CliRunner().invoke(main, ["bench", "route", *flags])


def test_the_command_reports_every_router(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    write_trace(trace, synthetic_trace(60, seed=0))
    flags = ["--trace", str(trace), "--time-scale", "0.1", "--replicas", "40", "--num-pages", "3000"]
    done = invoke(*flags, "--json", str(tmp_path / "json"))
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "json").read_text())["results"]
    assert [row["router"] for row in rows] == [*ROUTERS, "one replica"]
    assert [line.split("  ")[0] for line in done.output.splitlines()[1:5]] == [*ROUTERS, "one replica"]
    assert {row["num_requests"] for row in rows} == {sum(each.input_length < 40_000 for each in read_trace(trace))}


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--replica-model", "scheduler", "--replicas", "33"], "--replicas"),
        (["--replica-model", "simple", "--page-size", "8"], "--page-size"),
        (["--num-pages", "2"], "--num-pages"),
        (["--num-pages", "2", "--working-set", "1"], "--working-set"),
        (["--time-scale", "2"], "--time-scale"),
        (["--trace", "x", "--num-turns", "2"], "--num-turns"),
    ],
)
def test_flags_without_effect_are_refused(flags: list[str], name: str) -> None:
    done = invoke(*flags)
    assert isinstance(done.exception, InvalidValueError) or done.exit_code == 2
    assert name in str(done.exception) + done.output
