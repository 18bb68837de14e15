"""GEMMs by packed GGUF weights on a CPU, beside plain reads of the same bytes.

    python scripts/bench_cpu_gemm.py --type Q4_0 --type Q8_0 [--shape 4096x4096] [--rows 1] [--threads 2] [--rounds 11]

Each round multiplies by all matrices and then sums their bytes as 64-bit integers. Prints medians. The default shapes are those
of four layers of Llama-7B, which exceed the cache of most processors by far.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from minisgl_backends.quantization.gguf_cpu import CpuGgufLinear, CpuLinearMethod
from minisgl_backends.quantization.gguf_types import TYPES
from minisgl_core.contracts.layer_methods import LinearPart, LinearSpec
from minisgl_core.contracts.shard import Shard

SHAPES = (["4096x4096"] * 4 + ["11008x4096"] * 2 + ["4096x11008"]) * 4


def make(kind: str, shape: str) -> CpuGgufLinear:
    """Return a layer of the shape ROWSxCOLUMNS with random codes, whose scales are finite."""
    rows, columns = map(int, shape.split("x"))
    part = LinearPart("m", Shard.whole(rows))
    spec = LinearSpec("m", (part,), Shard.whole(columns), False, False, torch.float32, torch.device("cpu"))
    method = CpuLinearMethod(spec, [TYPES[kind]])
    for blocks in method.blocks:
        blocks.random_(0, 60)
    return method.prepare()


def seconds(run: Callable[[], object]) -> float:
    """Return the duration of a call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(kind: str, shapes: list[str], num_rows: int, threads: int, rounds: int) -> None:
    """Print the bandwidth of the GEMMs, and of reads, for one type and number of threads."""
    layers = [make(kind, shape) for shape in shapes]
    xs = [torch.randn(num_rows, int(shape.split("x")[1])) for shape in shapes]
    packed = [matrix for layer in layers for matrix in layer.packed]
    words = [matrix[: len(matrix) // 8 * 8].view(torch.int64) for matrix in packed]
    torch.set_num_threads(threads)
    runs = {
        "gemm": lambda: [layer(x) for layer, x in zip(layers, xs, strict=True)],
        "read": lambda: [each.sum() for each in words],
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            duration = seconds(run)
            if turn:  # the first turn is a warm-up
                times[name].append(duration)
    num_bytes = sum(map(len, packed))
    rates = {name: num_bytes / statistics.median(each) / 1e9 for name, each in times.items()}
    share = statistics.median(read / gemm for gemm, read in zip(times["gemm"], times["read"], strict=True))
    print(
        f"{kind}, {num_bytes / 1e6:.0f} MB, {num_rows} rows, {threads} threads: "
        f"{rates['gemm']:.1f} GB/s, plain reads {rates['read']:.1f} GB/s, ratio {share:.2f}",
        flush=True,
    )


def main() -> None:
    """Measure each combination of the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--type", action="append", choices=TYPES)
    parser.add_argument("--shape", action="append", help="ROWSxCOLUMNS, once per matrix")
    parser.add_argument("--rows", type=int, action="append")
    parser.add_argument("--threads", type=int, action="append")
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args()
    for kind in arguments.type or TYPES:
        for num_rows in arguments.rows or [1]:
            for threads in arguments.threads or [1, 2]:
                measure(kind, arguments.shape or SHAPES, num_rows, threads, arguments.rounds)


if __name__ == "__main__":
    main()
