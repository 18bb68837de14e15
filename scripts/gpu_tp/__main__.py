"""Tests and measurements of tensor parallelism and of the KV pool's limits on a machine with GPUs.

    python scripts/gpu_tp [--tp N ...] [--phase NAME ...] [--communicator NAME ...] [--out DIR]

Each phase runs in processes of its own, which are killed at a time limit:

    all-reduce  All-reduces of every communicator are correct and equal to the bit on all ranks, eagerly and in CUDA graphs.
                Latencies of 2 KB to 8 MB in a graph, beside the limit of the link.
    tokens      Greedy float32 tokens of tiny Llama, Qwen3 and Qwen3-MoE models equal those of one GPU, with and without graphs.
                A killed rank ends `generate` within 10 s with an error that names it, and a new LLM works.
    fill        Qwen3-0.6B on one GPU with every page in use: most requests, longest prompts, penalties, log-probabilities.
                The memory that is left.
    speed       Qwen3-32B with dummy weights: phases of the start-up, and throughput of workload W.

Writes DIR/gpu_tp.json and DIR/gpu_tp.log, prints a table, and exits with 1 after a failure. Without --tp, it tests 2 and 4
if the machine has as many GPUs (the speed only for the larger). It does not use NVLink multicast.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from all_reduces import all_reduces, latency_table
from fill import fill
from report import Result
from speed import speed
from tokens import references, tokens

PHASES = ("all-reduce", "tokens", "fill", "speed")
COMMUNICATORS = ("torch", "pynccl", "oneshot")
LIMITS_S = {"all-reduce": 150, "tokens": 180, "fill": 150, "speed": 180}
WORKERS: dict[str, Callable[..., None]] = {
    "all-reduce": all_reduces,
    "references": references,
    "tokens": tokens,
    "fill": fill,
    "speed": speed,
}


def run_part(out: Path, worker: str, phase: str, tp: int, *arguments: Any) -> list[Result]:
    """Run a worker in a process of its own. Return its results, and a failure if it did not end well and in time."""
    label = "-".join([worker, str(tp), *(a for a in arguments if isinstance(a, str) and "/" not in a)])
    command = [sys.executable, str(Path(__file__).parent), "--worker", json.dumps([worker, *arguments])]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    timed_out = threading.Event()

    def end() -> None:
        timed_out.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(LIMITS_S[phase], end)
    timer.daemon = True
    timer.start()
    started, results, lines = time.perf_counter(), list[Result](), list[str]()
    assert process.stdout is not None
    with (out / "gpu_tp.log").open("a") as log:
        log.write(f"==== {label}\n")
        for line in process.stdout:
            if line.startswith("RESULT "):
                results.append(json.loads(line.removeprefix("RESULT ")))
                show(results[-1])
            else:
                lines.append(line.rstrip())
                log.write(line)
                log.flush()
    status = process.wait()
    timer.cancel()
    if status != 0 or timed_out.is_set():
        why = f"exit status {status} after {time.perf_counter() - started:.0f} s"
        if timed_out.is_set():
            why = f"ended after {LIMITS_S[phase]} s" if status else "left processes behind"
        results.append({"phase": phase, "tp": tp, "what": label, "ok": False, "note": why})
        show(results[-1])
        print("\n".join(f"    | {line[:200]}" for line in lines[-25:]), flush=True)
    return results


def show(result: Result) -> None:
    """Print a result."""
    mark = "ok   " if result["ok"] else "WRONG"
    print(f"{mark} {result['phase']:6} tp {result['tp']}  {result['what']}: {result['note']}", flush=True)


@click.command(help=__doc__)
@click.option("--tp", "sizes", type=int, multiple=True)
@click.option("--phase", "phases", type=click.Choice(PHASES), multiple=True)
@click.option("--communicator", "communicators", multiple=True, default=COMMUNICATORS)
@click.option("--out", default=lambda: os.environ.get("OUT", "."), type=click.Path(path_type=Path))
@click.option("--worker", hidden=True)
def main(
    sizes: tuple[int, ...], phases: tuple[str, ...], communicators: tuple[str, ...], out: Path, worker: str | None
) -> None:
    """See the module's text."""
    for name in ("NCCL_NVLS_ENABLE", "NVSHMEM_DISABLE_NVLS", "TORCH_SYMM_MEM_DISABLE_MULTICAST"):
        os.environ.setdefault(name, "0" if name == "NCCL_NVLS_ENABLE" else "1")
    if worker is not None:
        name, *arguments = json.loads(worker)
        WORKERS[name](*arguments)
        return
    import torch

    from minisgl_core.plugins.registry import Registry

    if missing := set(communicators) - set(Registry.from_environment().names("communicator")):
        sys.exit(f"no such communicator: {', '.join(sorted(missing))}; are the wheels older than the checkout?")
    sizes = sizes or tuple(size for size in (2, 4) if size <= torch.cuda.device_count())
    phases = phases or PHASES
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu_tp.log").write_text("")
    scratch = Path(tempfile.mkdtemp(prefix="gpu-tp-"))
    results: list[Result] = []
    if "all-reduce" in phases:
        for tp in sizes:
            results += run_part(out, "all-reduce", "all-reduce", tp, tp, list(communicators))
            print("\n".join(latency_table(results, tp)), flush=True)
    if "tokens" in phases:
        results += run_part(out, "references", "tokens", 1, str(scratch / "tiny"))
        for tp in sizes:
            for communicator in communicators:
                results += run_part(out, "tokens", "tokens", tp, str(scratch / "tiny"), tp, communicator)
    shapes = {"fill": "qwen3-0.6b", "speed": "qwen3-32b"}
    for phase in [phase for phase in shapes if phase in phases]:
        script = Path(__file__).parents[1] / "make_model.py"
        subprocess.run([sys.executable, script, shapes[phase], scratch / shapes[phase]], check=True)
        if phase == "fill":
            results += run_part(out, "fill", "fill", 1, str(scratch / shapes[phase]))
        else:
            for communicator in reversed(communicators) if sizes else ():
                results += run_part(
                    out, "speed", phase, max(sizes), str(scratch / shapes[phase]), max(sizes), communicator
                )
    (out / "gpu_tp.json").write_text(json.dumps(results, indent=1))
    print("\n---- summary")
    for result in results:
        show(result)
    for tp in sizes:
        print("\n".join(latency_table(results, tp)))
    sys.exit(0 if all(result["ok"] for result in results) else 1)


if __name__ == "__main__":
    main()
