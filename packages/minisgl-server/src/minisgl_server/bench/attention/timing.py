"""Times a step of attention."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from minisgl_core.contracts.attention import AttentionBackend
from minisgl_server.bench.attention.cases import NUM_LAYERS, Case

CALLS_BETWEEN_EVENTS = 10
"""Calls per timed interval on a GPU, as a single call takes less time than its launch."""


def time_case(case: Case, repeats: int) -> dict[str, Any]:
    """Check the output first, then time the layers and the plan.

    Returns:
        error: error relative to the tolerance; more than 1 is wrong.
        ms: device time per layer.
        plan_us: host time per plan, which is made once per step.
        is_graph: the layers were replayed from a CUDA graph, as in serving.
    """
    backend, is_decode = case.backend, case.batch.num_decodes > 0
    if case.spec.device.type == "cuda" and is_decode and backend.capabilities.cuda_graphs:
        return _time_graph(case, backend, repeats)
    plan = backend.plan(case.batch)
    error = case.error(case.forward(plan))
    run = lambda: case.forward(plan)  # noqa: E731  # a one-line function
    seconds = _device_seconds(run, repeats) if case.spec.device.type == "cuda" else _host_seconds(run, repeats)
    return _timing(error, seconds, _host_seconds(lambda: backend.plan(case.batch), repeats), False)


def _time_graph(case: Case, backend: AttentionBackend, repeats: int) -> dict[str, Any]:
    plan = backend.plan_capture(case.batch)
    error = case.error(case.forward(plan))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.forward(plan)
    plan_s = _host_seconds(lambda: backend.plan_replay(case.batch), repeats)
    graph.replay()
    error = max(error, case.error(out))
    return _timing(error, _device_seconds(graph.replay, repeats), plan_s, True)


def _timing(error: float, seconds: float, plan_s: float, is_graph: bool) -> dict[str, Any]:
    return {"error": error, "ms": 1e3 * seconds / NUM_LAYERS, "plan_us": 1e6 * plan_s, "is_graph": is_graph}


def _host_seconds(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times[1:])


def _device_seconds(run: Callable[[], object], repeats: int) -> float:
    make: Any = torch.cuda.Event  # untyped
    times: list[float] = []
    run()
    for _ in range(repeats):
        start, stop = make(enable_timing=True), make(enable_timing=True)
        start.record()
        for _ in range(CALLS_BETWEEN_EVENTS):
            run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / CALLS_BETWEEN_EVENTS / 1000)
    return median(times)
