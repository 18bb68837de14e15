"""Run of ``minisgl bench route``: the simulations of all routers, and their table."""

from collections.abc import Iterator
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
from minisgl_server.bench.route.replica import replica_limits
from minisgl_server.bench.route.requests import chat_trace, num_distinct_blocks, simulated_requests
from minisgl_server.bench.route.simulation import Setup, Simulation
from minisgl_server.bench.route.step_time import StepTime
from minisgl_server.bench.trace.format import BLOCK_TOKENS, read_trace

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
    if options.trace is not None:
        trace = read_trace(Path(options.trace), options.num_requests)
    else:
        trace = chat_trace(options)
    num_pages = options.num_pages
    if num_pages is None:
        all_tokens = num_distinct_blocks(trace) * BLOCK_TOKENS / options.working_set
        num_pages = max(1, round(all_tokens / (options.replicas * options.page_size)))
    num_tokens = num_pages * options.page_size
    fitting = [each for each in trace if each.input_length + each.output_length <= num_tokens]
    if not fitting:
        raise InvalidValueError("--num-pages", num_pages, "enough for one of the requests")
    results = []
    for name, setup in _setups(options, num_pages):
        simulation = Simulation(setup, len(fitting)).run(simulated_requests(fitting, options.time_scale))
        results.append(_as_json(name, simulation))
    print_results(COLUMNS, results)
    pages = num_distinct_blocks(fitting) * BLOCK_TOKENS / (options.replicas * num_tokens)
    click.echo(f"{len(fitting)} requests, {len(trace) - len(fitting)} left out because they do not fit in a replica.")
    click.echo(f"{num_pages} pages of {options.page_size} tokens per replica.")
    click.echo(f"The requests have {pages:.2f} times as many distinct pages as all replicas together.")
    click.echo("Decision and busy are times of this machine; all else is simulated.")
    write_json(options.json_file, options=vars(options), results=results)


def _setups(options: SimpleNamespace, num_pages: int) -> Iterator[tuple[str, Setup]]:
    """Yield a setup per router, and one of a single replica that is as large and as fast as all of them."""
    num, size, registry = options.replicas, options.page_size, Registry.from_environment()
    model = options.replica_model
    if model == "simple" and block_size_for(size) != size:
        allowed = "16 or more with --replica-model simple"
        raise InvalidValueError("--page-size", size, allowed)
    step_time = StepTime(options.weights_ms, options.token_us, options.request_us, options.kv_token_ns, options.pair_ns)
    running, prefill = options.max_running_requests, options.max_prefill_length
    setup = Setup(
        num_replicas=num,
        limits=replica_limits(num_pages, size, running, prefill),
        step_time=step_time,
        router=registry.load("router", "round-robin"),
        overload=(options.router_overload_requests, options.router_overload_ratio),
        cache=registry.load("prefix_cache", "radix") if model == "scheduler" else None,
    )
    routers = {name: registry.load("router", name) for name in options.routers}
    for name, router in routers.items():
        yield name, replace(setup, router=router)
    if num > 1:
        whole = replica_limits(num * num_pages, size, num * running, num * prefill)
        yield "one replica", replace(setup, num_replicas=1, limits=whole, step_time=replace(step_time, speed=num))


def _as_json(name: str, simulation: Simulation) -> dict[str, Any]:
    num_routed, stats, end_s = simulation.num_routed, simulation.router_stats, simulation.now_s
    busy_s = float(simulation.decision_s.sum()) + simulation.event_s
    return {
        "router": name,
        "num_requests": simulation.num_ended,
        "hit_rate": simulation.hit_rate,
        "ttft_ms": (1e3 * np.percentile(simulation.ttft_s, [50, 99])).tolist(),
        "tpot_ms": (1e3 * np.percentile(simulation.tpot_s, [50, 99])).tolist(),
        "output_tokens_per_s": simulation.num_output_tokens / end_s,
        "simulated_s": end_s,
        "max_to_mean_load": max(num_routed) * len(num_routed) / simulation.num_ended,
        "decision_us": (1e6 * np.percentile(simulation.decision_s, [50, 99])).tolist(),
        "router_busy": busy_s / end_s,
        "router_stats": stats,
        "table_mib": None if (size := stats.get("table_bytes")) is None else size / 2**20,
    }
