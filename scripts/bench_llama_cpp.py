"""GGUF files on a CPU: minisgl beside llama.cpp, in turns of one run.

    python scripts/bench_llama_cpp.py --peer-python PYTHON model.Q4_1.gguf [--type Q4_0] [--workload prefill] [--rounds 5]

PYTHON is an interpreter with llama-cpp-python. ``--type`` also compares the file requantized by llama.cpp. Both engines get
the same random prompts and two threads. llama.cpp runs through its C API and samples nothing; minisgl also samples.
Prints medians, and the rate at which two threads read the file's bytes from memory.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

WORKLOADS = {"batch 1": (1, 64, 128), "batch 16": (16, 64, 128), "prefill": (1, 1024, 1)}
"""Requests, prompt tokens, and output tokens per request."""
THREADS = 2
Run = Callable[[list[list[int]], int], object]


def minisgl_engine(model: str) -> Run:
    """Return a function that generates tokens with `LLM`."""
    from minisgl_core import LLM, SamplingParams

    llm = LLM(model)
    return lambda prompts, num_tokens: llm.generate(
        prompts, SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True), progress=False
    )


def llama_engine(model: str) -> Run:
    """Return a function that runs the same steps with llama.cpp: all prompts as one batch, then a token per sequence."""
    import llama_cpp as api

    context = api.llama_context_default_params()
    context.n_ctx, context.n_batch, context.n_seq_max = 16 * 1088, 2048, 16
    context.n_threads = context.n_threads_batch = THREADS
    loaded = api.llama_model_load_from_file(model.encode(), api.llama_model_default_params())
    handle, batch = api.llama_init_from_model(loaded, context), api.llama_batch_init(2048, 0, 1)

    def decode(tokens: Sequence[tuple[int, int, int, bool]]) -> None:
        for i, (token, position, sequence, is_last) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, is_last
            batch.seq_id[i][0] = sequence
        batch.n_tokens = len(tokens)
        assert api.llama_decode(handle, batch) == 0, "llama_decode failed"

    def run(prompts: list[list[int]], num_tokens: int) -> None:
        api.llama_memory_clear(api.llama_get_memory(handle), True)
        length = len(prompts[0])
        decode([(t, i, s, i == length - 1) for s, prompt in enumerate(prompts) for i, t in enumerate(prompt)])
        api.llama_synchronize(handle)
        for step in range(num_tokens - 1):
            decode([(prompt[step % length], length + step, s, True) for s, prompt in enumerate(prompts)])
            api.llama_synchronize(handle)

    return run


def serve(make: Callable[[str], Run], model: str) -> None:
    """Run the workload that each line of stdin names, and print its seconds."""
    run = make(model)
    for turn, line in enumerate(sys.stdin):
        count, length, num_tokens = WORKLOADS[line.strip()]
        rng = random.Random(turn)
        prompts = [[rng.randrange(1000, 40000) for _ in range(length)] for _ in range(count)]
        start = time.perf_counter()
        run(prompts, num_tokens)
        print(f"seconds {time.perf_counter() - start}", flush=True)


def quantize(source: str, target: str, kind: str) -> None:
    """Write `source` with weights of the type `kind`."""
    import llama_cpp as api

    params = api.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = getattr(api, f"LLAMA_FTYPE_MOSTLY_{kind}"), True
    assert api.llama_model_quantize(source.encode(), target.encode(), params) == 0, "llama_model_quantize failed"


def read_rate(model: str) -> float:
    """Return the bytes per second at which two threads sum the file's bytes in memory, the best of 20 passes."""
    import numpy as np
    import torch

    torch.set_num_threads(THREADS)
    data = torch.from_numpy(np.fromfile(model, np.int64, Path(model).stat().st_size // 8))
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - start)
    return data.nbytes / best


def compare(model: Path, peer_python: str, workloads: Sequence[str], rounds: int) -> None:
    """Print a line per workload."""
    print(
        f"{model.name}: plain reads {read_rate(str(model)) / 1e9:.1f} GB/s, {model.stat().st_size / 1e6:.1f} MB",
        flush=True,
    )
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS)}
    workers = {}
    for name, python in ("minisgl", sys.executable), ("llama", peer_python):
        command = [python, __file__, "--serve", name, str(model)]
        workers[name] = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
    try:
        for workload in workloads:
            count, _, num_tokens = WORKLOADS[workload]
            seconds: dict[str, list[float]] = {name: [] for name in workers}
            for turn in range(rounds + 1):
                for name, worker in workers.items():
                    assert worker.stdin is not None
                    assert worker.stdout is not None
                    print(workload, file=worker.stdin, flush=True)
                    line = next(text for text in worker.stdout if text.startswith("seconds"))
                    if turn:  # the first turn is a warm-up
                        seconds[name].append(float(line.split()[1]))
            ours, theirs = (statistics.median(each) for each in seconds.values())
            best = min(seconds["llama"]) / min(seconds["minisgl"])
            tokens = count * num_tokens
            shown = (
                f"{ours * 1e3:.0f} and {theirs * 1e3:.0f} ms"
                if num_tokens == 1
                else f"{tokens / ours:.1f} and {tokens / theirs:.1f} tokens per second"
            )
            print(
                f"  {workload}: minisgl and llama.cpp {shown}, ratio {theirs / ours:.2f}; of the fastest runs {best:.2f}",
                flush=True,
            )
    finally:
        for worker in workers.values():
            worker.kill()


def main() -> None:
    """Compare the engines, or run one of them as a child process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--type", action="append", default=[], help="also requantize to this type, such as Q4_0")
    parser.add_argument("--workload", action="append", choices=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", choices=("minisgl", "llama"), help=argparse.SUPPRESS)
    parser.add_argument("--quantize", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(minisgl_engine if arguments.serve == "minisgl" else llama_engine, str(arguments.model))
    elif arguments.quantize:
        quantize(str(arguments.model), *arguments.quantize)
    else:
        workloads = arguments.workload or list(WORKLOADS)
        compare(arguments.model, arguments.peer_python, workloads, arguments.rounds)
        for kind in arguments.type:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, f"{arguments.model.stem.split('.')[0]}.{kind}.gguf")
                command = [arguments.peer_python, __file__, "--quantize", str(path), kind, "--", str(arguments.model)]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                compare(path, arguments.peer_python, workloads, arguments.rounds)


if __name__ == "__main__":
    main()
