"""Run of ``minisgl bench route``: the simulations of all routers, and their table."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np

from minisgl_core.contracts.router import block_size_for
from minisgl_core.errors import InvalidValueError
from minisgl_core.plugins.registry import Registry
from minisgl_server.bench.environment import print_results, write_json
from minisgl_server.bench.route.command import MAX_SCHEDULERS, STEP_TIME
from minisgl_server.bench.route.requests import chat_trace, num_distinct_blocks, simulated_requests
from minisgl_server.bench.route.scheduler_replica import ReplicaLimits
from minisgl_server.bench.route.simulation import Outcome, Setup, simulate
from minisgl_server.bench.route.step_time import StepTime
from minisgl_server.bench.trace.format import BLOCK_TOKENS, TraceRequest, read_trace

COLUMNS = (
    ("router", "{router}"),
    ("hit rate", "{hit_rate:.4f}"),
    ("TTFT ms p50", "{ttft_ms[0]:,.1f}"),
    ("p99", "{ttft_ms[1]:,.1f}"),
    ("TPOT ms p50", "{tpot_ms[0]:.1f}"),
    ("output tok/s", "{output_tokens_per_s:,.0f}"),
    ("max/mean load", "{max_to_mean_load:.2f}"),
    ("decision us p50", "{decision_us[0]:.0f}"),
    ("p99", "{decision_us[1]:.0f}"),
    ("router busy", "{router_busy:.2%}"),
    ("table MiB", "{table_mib:.1f}"),
)


def run_route(options: SimpleNamespace) -> None:
    """Simulate the routers, print the table, and write the JSON file; `options` are the command's flags."""
    trace = _trace(options)
    limits = _replica_limits(options, trace)
    fitting = [each for each in trace if each.input_length + each.output_length <= limits.num_tokens]
    if not fitting:
        raise InvalidValueError("--num-pages", limits.num_pages, "enough for one of the requests")
    results = []
    for name, setup in _runs(options, limits):
        requests = simulated_requests(fitting, options.time_scale)
        results.append(_as_json(name, simulate(setup, requests, len(fitting))))
    print_results(COLUMNS, results)
    pages = num_distinct_blocks(fitting) * BLOCK_TOKENS / (options.replicas * limits.num_tokens)
    click.echo(f"{len(fitting)} requests, {len(trace) - len(fitting)} left out because they do not fit in a replica.")
    click.echo(
        f"{limits.num_pages} pages of {limits.page_size} per replica; the distinct pages are {pages:.2f} of all pages."
    )
    click.echo("Decision and busy are times of this machine; all else is simulated.")
    write_json(options.json_file, options=vars(options), results=results)


def _trace(options: SimpleNamespace) -> list[TraceRequest]:
    if options.trace is not None:
        return read_trace(Path(options.trace), options.num_requests)
    return chat_trace(options)


def _replica_limits(options: SimpleNamespace, trace: Sequence[TraceRequest]) -> ReplicaLimits:
    page_size, num_pages = options.page_size, options.num_pages
    if num_pages is None:
        num_tokens = num_distinct_blocks(trace) * BLOCK_TOKENS / options.working_set
        num_pages = max(1, round(num_tokens / (options.replicas * page_size)))
    return ReplicaLimits(
        num_pages=num_pages,
        page_size=page_size,
        max_running=options.max_running_requests,
        max_prefill_tokens=options.max_prefill_length,
    )


def _runs(options: SimpleNamespace, limits: ReplicaLimits) -> list[tuple[str, Setup]]:
    """Return a setup per router, and one of a single replica that is as large and as fast as all of them."""
    num, registry = options.replicas, Registry.from_environment()
    model = options.replica_model or ("scheduler" if num <= MAX_SCHEDULERS else "simple")
    if model == "scheduler" and num > MAX_SCHEDULERS:
        raise InvalidValueError("--replicas", num, f"at most {MAX_SCHEDULERS} with --replica-model scheduler")
    if model == "simple" and block_size_for(limits.page_size) != limits.page_size:
        raise InvalidValueError(
            "--page-size", limits.page_size, "a block of the router with --replica-model simple: 16 or more"
        )
    times = {name: getattr(options, name) for name in STEP_TIME}
    setup = Setup(
        num_replicas=num,
        limits=limits,
        step_time=StepTime(**times),
        router=registry.load("router", "round-robin"),
        overload=(options.router_overload_requests, options.router_overload_ratio),
        cache=registry.load("prefix_cache", "radix") if model == "scheduler" else None,
    )
    runs = [(name, replace(setup, router=registry.load("router", name))) for name in options.routers]
    if num > 1:
        whole = ReplicaLimits(
            num_pages=num * limits.num_pages,
            page_size=limits.page_size,
            max_running=num * limits.max_running,
            max_prefill_tokens=num * limits.max_prefill_tokens,
        )
        fast = StepTime(**times, speed=float(num))
        runs.append(("one replica", replace(setup, num_replicas=1, limits=whole, step_time=fast)))
    return runs


def _as_json(name: str, outcome: Outcome) -> dict[str, Any]:
    busy_s = float(outcome.decision_s.sum()) + outcome.event_s
    return {
        "router": name,
        "num_requests": outcome.num_requests,
        "hit_rate": outcome.hit_rate,
        "ttft_ms": [float(value) * 1e3 for value in np.percentile(outcome.ttft_s, [50, 99])],
        "tpot_ms": [float(value) * 1e3 for value in np.percentile(outcome.tpot_s, [50, 99])],
        "output_tokens_per_s": outcome.num_output_tokens / outcome.end_s,
        "simulated_s": outcome.end_s,
        "max_to_mean_load": max(outcome.num_routed) * len(outcome.num_routed) / outcome.num_requests,
        "decision_us": [float(value) * 1e6 for value in np.percentile(outcome.decision_s, [50, 99])],
        "router_busy": busy_s / outcome.end_s,
        "router_stats": outcome.stats,
        "table_mib": None if (size := outcome.stats.get("table_bytes")) is None else size / 2**20,
        "wall_s": outcome.wall_s,
    }
