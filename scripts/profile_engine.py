"""Profile of workload W on a GPU: time per kind of kernel, and idle time per decode step.

    python scripts/profile_engine.py MODEL_DIR [--dummy-weight] [any option of LLM as name=value ...]

Prints the throughput of W without a profiler, then tables from traces: the time of W per kind of kernel, and the time of a
layer in captured decode steps per number of requests. For decodes of 256 requests and of one request, it prints the part
of a step in which no kernel runs.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import click
import torch
from torch.profiler import ProfilerActivity, profile

from minisgl_core import LLM, SamplingParams
from minisgl_core.protocol.batch_plan import BatchPlan
from minisgl_server.bench.workloads import mixed

KINDS = {
    "all-reduce": r"nccl|all_?reduce|one_shot|two_shot",
    "experts": r"_grouped_gemm",
    "routing": r"^_route|^_sort|_sum_experts",
    "attention": r"flash|_decode\b|_merge\b|_prefill\b|^decode|^prefill|Decode|Prefill|[aA]ttention|[cC]ombine|varlen|fmha",
    "GEMM": r"gemm|cutlass|nvjet|cublas|sm90_xmma|splitK|wgmma",
    "norm": r"rms_norm",
    "RoPE, store": r"qk_norm_rope|store_kv",
    "activation": r"_activation_and_mul|silu|gelu",
    "sampling": r"^_reduce|^_find|argmax|softmax|log_softmax",
    "copies": r"Memcpy|Memset|memcpy|memset",
}
PREFILL = r"flash|Flash|_prefill\b|^prefill|Prefill"
"""Attention of prompts, where decodes have another kernel (``attn=fa,triton``)."""
LAST_OF_STEP = r"^_find|argmax"
CAPTURED = "_decode_inputs", "_decode_outputs"
"""First and last kernel of captured decode steps."""
REQUESTS = 32
"""Width of a line of the table of layers, in requests."""
Kernels = list[tuple[str, int, int]]
"""(name, start, end) in nanoseconds, by start."""


def trace(run: Callable[[], Any]) -> Kernels:
    """Return the kernels that ran during `run`."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return kernels_of(profiler)


def kernels_of(profiler: profile) -> Kernels:
    """Return the kernels in a profile."""
    events = profiler.profiler.kineto_results.events()
    kernels = [
        (event.name(), event.start_ns(), event.end_ns())
        for event in events
        if event.device_type() == torch.autograd.DeviceType.CUDA
    ]
    return sorted(kernels, key=lambda kernel: kernel[1])


def trace_decodes(llm: LLM, prompts: list[list[int]], sampling: SamplingParams) -> tuple[Kernels, int]:
    """Return the kernels of some steps that only decode, from the end of one step to the end of another, and their number."""
    profiler = profile(activities=[ProfilerActivity.CUDA])
    num_pure = 0

    def planned(plan: BatchPlan) -> None:
        nonlocal num_pure
        num_pure += plan.num_decodes == plan.num_requests
        if num_pure in (8, 48):
            torch.cuda.synchronize()
            (profiler.start if num_pure == 8 else profiler.stop)()

    scheduler = llm._loop.scheduler
    scheduler.step_planned = planned
    llm.generate(prompts, sampling)
    scheduler.step_planned = None
    kernels = kernels_of(profiler)
    ends = [end for name, _, end in kernels if re.search(LAST_OF_STEP, name)]
    first, last = ends[2], ends[-2]  # the profiler's own start delays the first of them
    return [kernel for kernel in kernels if first <= kernel[1] and kernel[2] <= last], len(ends) - 4


def additions(kernels: Kernels, end: int = 0) -> Iterator[tuple[str, float]]:
    """Yield each kernel's name and the seconds that it adds: from the end of the kernels before it, or `end`, to its own."""
    for name, start, stop in kernels:
        yield name, max(0, stop - max(start, end)) / 1e9
        end = max(end, stop)


def busy(kernels: Kernels) -> tuple[float, float]:
    """Return the seconds in which a kernel ran, and the seconds from the first to the last."""
    span = max(stop for _, _, stop in kernels) - kernels[0][1]
    return sum(added for _, added in additions(kernels)), span / 1e9


def kind_of(name: str) -> str:
    """Return the row of the table for a kernel."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "other")


def report(title: str, kernels: Kernels, steps: int) -> dict[str, Any]:
    """Print a table of the kinds of kernels. A kernel counts for the time that it adds; see `additions`."""
    in_use, span = busy(kernels)
    seconds: dict[str, float] = defaultdict(float)
    names: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for name, added in additions(kernels):
        seconds[kind_of(name)] += added
        names[name][0] += added
        names[name][1] += 1
    total = sum(seconds.values())
    print(
        f"\n{title}: {span:.3f} s, idle {1 - in_use / span:.1%}, {len(kernels)} kernels, {span / steps * 1e3:.3f} ms per step"
    )
    for kind, part in sorted(seconds.items(), key=lambda item: -item[1]):
        print(f"  {kind:18} {part:8.3f} s {part / total:6.1%}")
    for name, (part, count) in sorted(names.items(), key=lambda item: -item[1][0])[:16]:
        print(f"    {part:8.3f} s {int(count):7} x {part / count * 1e6:8.1f} us  {name[:90]}")
    sys.stdout.flush()
    return {"title": title, "span_s": span, "idle": 1 - in_use / span, "seconds": dict(seconds)}


def report_layers(kernels: Kernels, plans: list[tuple[int, int]], num_layers: int, token_bytes: int) -> None:
    """Print the time of a layer in captured decode steps. `plans` has the requests and all their tokens per step.

    A kernel counts for the time that it adds. Kernels after a step's last norm belong to no layer. `token_bytes` is the size
    of K and V per token.
    """
    firsts, lasts = ([i for i, kernel in enumerate(kernels) if name in kernel[0]] for name in CAPTURED)
    if not len(firsts) == len(lasts) == len(plans):
        print(f"\n{len(plans)} steps of decodes were planned, {len(firsts)} captured ones ran: no table of layers")
        return
    microseconds: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for (num_requests, num_tokens), first, last in zip(plans, firsts, lasts, strict=True):
        row = microseconds[-(-num_requests // REQUESTS) * REQUESTS]
        row["steps"] += 1
        row["K and V at 4.5 TB/s"] += num_tokens * token_bytes / 4.5e6
        last_norm = max(i for i in range(first, last) if kind_of(kernels[i][0]) == "norm")
        end = kernels[first - 1][2] if first else kernels[first][1]
        row["until it begins"] += (kernels[first][1] - end) / 1e3
        for index, (name, added) in enumerate(additions(kernels[first : last + 1], end), first):
            if index > last_norm:
                row["after the layers"] += added * 1e6
            else:
                row[kind_of(name)] += added * 1e6 / num_layers
    kinds = list(dict.fromkeys(kind for row in microseconds.values() for kind in row if kind != "steps"))
    print(
        f"\nmicroseconds per layer in captured decode steps, and per step for the rest:\n  requests  steps  {'  '.join(kinds)}"
    )
    for most, row in sorted(microseconds.items()):
        values = "  ".join(f"{row[kind] / row['steps']:{len(kind)}.1f}" for kind in kinds)
        print(f"  {most - REQUESTS + 1:3}..{most:3}  {int(row['steps']):5}  {values}")


def workload_w(variant: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return the prompts of workload W, which differ per variant, and their sampling parameters."""
    w = mixed(256, 10_001, variant)  # the largest id of W is 10,000
    return w.prompts, [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n) for n in w.output_lens]


@click.command()
@click.argument("model")
@click.argument("options", nargs=-1)
@click.option("--dummy-weight", is_flag=True)
@click.option("--trace-w/--no-trace-w", default=True, help="also trace the whole of W")
@click.option("--json", "path", type=click.Path(dir_okay=False))
def main(model: str, options: tuple[str, ...], dummy_weight: bool, trace_w: bool, path: str | None) -> None:
    """Profile one model."""
    begun = time.perf_counter()
    found: list[dict[str, Any]] = []
    pairs = dict(option.split("=") for option in options)
    with LLM(model, dtype="bfloat16", dummy_weight=dummy_weight, **pairs) as llm:
        print(f"{model} {pairs}: start {time.perf_counter() - begun:.1f} s", flush=True)
        prompts, _ = workload_w(1)
        llm.generate(prompts, SamplingParams(max_tokens=16, temperature=0.6, ignore_eos=True))
        prompts, params = workload_w(0)
        begun = time.perf_counter()
        num_tokens = sum(len(output.token_ids) for output in llm.generate(prompts, params))
        seconds = time.perf_counter() - begun
        print(f"W {model} {pairs}: {seconds:.2f} s, {num_tokens / seconds:.0f} tok/s", flush=True)
        found.append({"title": "W", "span_s": seconds, "tok_s": num_tokens / seconds})
        for batch in (256, 1):
            prompts = [[random.randint(0, 10000) for _ in range(560)] for _ in range(batch)]
            sampling = SamplingParams(max_tokens=96, temperature=0.6, ignore_eos=True)
            kernels, steps = trace_decodes(llm, prompts, sampling)
            found.append(report(f"decode of {batch}", kernels, steps))
        if trace_w:
            prompts, params = workload_w(2)
            plans: list[tuple[int, int]] = []

            def planned(plan: BatchPlan) -> None:
                if plan.num_decodes == plan.num_requests:
                    plans.append((plan.num_decodes, int((plan.starts + plan.num_new).sum())))

            llm._loop.scheduler.step_planned = planned
            kernels = trace(lambda: llm.generate(prompts, params))
            llm._loop.scheduler.step_planned = None
            found.append(report("W traced", kernels, max(p.max_tokens or 0 for p in params)))
            ends = [end for name, _, end in kernels if re.search(PREFILL, name)]
            if ends:
                print(f"  until the last kernel of a prompt: {(ends[-1] - kernels[0][1]) / 1e9:.3f} s")
            pool = llm._loop.model_runner.attention.pool.spec
            token_bytes = 2 * pool.num_kv_heads * pool.head_dim * pool.dtype.itemsize
            report_layers(kernels, plans, pool.num_layers, token_bytes)
    if path:
        with open(path, "w") as file:
            json.dump({"model": model, "options": pairs, "found": found}, file)


if __name__ == "__main__":
    main()
