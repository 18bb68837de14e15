"""Times a step of attention."""

import timeit
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

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
    backend, batch, is_cuda = case.backend, case.batch, case.spec.device.type == "cuda"
    is_graph = is_cuda and batch.num_decodes > 0 and backend.capabilities.cuda_graphs
    plan = backend.plan_capture(batch) if is_graph else backend.plan(batch)
    error = case.error(case.forward(plan))
    run: Callable[[], object] = partial(case.forward, plan)
    if is_graph:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = case.forward(plan)
        backend.plan_replay(batch)
        graph.replay()
        error = max(error, case.error(outs))
        run = graph.replay
    plan_s = _host_seconds(partial(backend.plan_replay if is_graph else backend.plan, batch), repeats)
    seconds = _device_seconds(run, repeats) if is_cuda else _host_seconds(run, repeats)
    return {"error": error, "ms": 1e3 * seconds / NUM_LAYERS, "plan_us": 1e6 * plan_s, "is_graph": is_graph}


def _host_seconds(run: Callable[[], object], repeats: int) -> float:
    return median(timeit.repeat(run, number=1, repeat=1 + repeats)[1:])


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
