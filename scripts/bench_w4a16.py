"""W4A16 GEMMs on a GPU: checks the Triton kernel against float64, then times tilings beside bfloat16 cuBLAS.

    python scripts/bench_w4a16.py [--seconds 60] [--rows 1 --rows 256]

Prints the microseconds of one GEMM among many in a CUDA graph, with weights outside of the L2 cache. The matrices are those of
Qwen3-14B, with a group size of 128. The last lines sum the best times over the layers of the model.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import click
import torch
import torch.nn.functional as F
import triton
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench_cudagraph

from minisgl_backends.kernels import int4_gemm
from minisgl_backends.kernels.activation import silu_and_mul
from minisgl_backends.kernels.int4_gemm import Int4Gemm, Int4Tiling, Int4Workspace
from minisgl_backends.kernels.int4_weight import Int4Weight

SHAPES = ((7168, 5120, False), (5120, 5120, False), (34816, 5120, True), (5120, 17408, False))
"""Qwen3-14B: outputs, inputs, and True for the gated projection."""
LAYERS = 40
COLD_BYTES = 500 << 20
WORKERS = 12


def random_weight(
    rows: int,
    columns: int,
    block: int | None,
    *,
    gated: bool,
    sub: int = 32,
    dtype: torch.dtype = torch.bfloat16,
) -> Int4Weight:
    """Return a packed weight of random codes, scales and zero points."""
    device = torch.device("cuda")
    weight = Int4Weight.empty(rows, columns, block, dtype, device, has_zeros=True, gated=gated, sub=sub)
    assert weight.zeros is not None
    weight.codes.random_(-(1 << 15), (1 << 15) - 1)
    weight.zeros.random_(0, 16)
    weight.scales.uniform_(0.5 / columns**0.5, 1 / columns**0.5).mul_(0.2)
    return weight


def check(scratch: Int4Workspace) -> bool:
    """Compare every path with float64."""
    right = True
    cases = [
        (rows, columns, block, gated, dtype)
        for rows, columns, block in ((7168, 5120, 128), (192, 640, 32), (320, 4352, 64), (136, 1000, None))
        for gated in (False, True)
        for dtype in (torch.bfloat16, torch.float16)
    ]
    for rows, columns, block, gated, dtype in cases:
        weight = random_weight(rows, columns, block, gated=gated, dtype=dtype)
        known = weight.dequantize(0, len(weight.codes))
        half = rows // 2
        stored = len(known) // 2
        known = torch.cat((known[:half], known[stored : stored + half])) if gated else known[:rows]
        bias = torch.randn(rows, device="cuda", dtype=dtype)
        tilings = [None, Int4Tiling(64, 16, 4), Int4Tiling(128, 32, 2, 8, 3), Int4Tiling(128, 64, 1, 8, 2)]
        words = int4_gemm.scale_words(weight), weight.zeros
        for tiling in tilings:
            weight.scales, weight.zeros = torch.empty_like(words[0], dtype=dtype), words[1]
            gemm = Int4Gemm(weight, bias, scratch, overlap=True, tiling=tiling)
            gemm._words = words[0]
            for num_rows in (1, 16, 17, 130, 256, 1025):
                x = torch.randn(num_rows, columns, device="cuda", dtype=dtype)
                expected = x.double() @ known.double().T + bias.double()
                if gated:
                    gate, up = expected.chunk(2, -1)
                    expected = F.silu(gate) * up
                first, second = gemm(x), gemm(x)
                error = float((first.double() - expected).norm() / expected.norm())
                if not error < 8e-3 or not torch.equal(first, second):
                    print(
                        f"WRONG: {rows}x{columns} {block} gated={gated} {dtype} {num_rows} rows {tiling}: {error:.1e}",
                        flush=True,
                    )
                    right = False
    print("all paths agree with float64" if right else "some paths are WRONG", flush=True)
    return right


def tilings(num_rows: int, *, gated: bool) -> Iterator[Int4Tiling]:
    """Yield useful tilings, the most promising first."""
    if num_rows <= 64:
        rows = max(16, triton.next_power_of_2(num_rows))
        for splits in (1, 2) if gated else (4, 2, 8):
            yield Int4Tiling(64, rows, splits, 4, 4)
            yield Int4Tiling(128, rows, splits, 8, 3)
            yield Int4Tiling(64, rows, splits, 4, 3)
        return
    yield Int4Tiling(128, 128, 1, 8, 3)
    yield Int4Tiling(64, 128, 1, 4, 2)
    yield Int4Tiling(64 if gated else 128, 256, 1, 8, 3)
    yield Int4Tiling(128, 64, 1, 8, 3)
    yield Int4Tiling(64, 64, 1, 4, 3)
    yield Int4Tiling(128, 128, 1, 8, 2)


def microseconds(calls: list[Callable[[], torch.Tensor]]) -> float:
    """Return the median of one call."""
    found = do_bench_cudagraph(lambda: [call() for call in calls], rep=6, return_mode="median")
    return float(found) * 1000 / len(calls)


def gemms_of(
    weights: list[Int4Weight], words: list[torch.Tensor], tiling: Int4Tiling | None, scratch: Int4Workspace
) -> list[Int4Gemm]:
    """Return a GEMM per weight; the words replace the scales, which a GEMM releases."""
    made = []
    for weight, each in zip(weights, words, strict=True):
        gemm = Int4Gemm(weight, None, scratch, overlap=True, tiling=tiling)
        gemm._words = each
        made.append(gemm)
    return made


def compile_part(part: int, all_rows: tuple[int, ...]) -> None:
    """Fill Triton's cache with every WORKERS-th variant."""
    scratch = Int4Workspace(torch.device("cuda"))
    variants = [
        (gated, sub, rows, tiling)
        for rows in sorted({max(16, rows) for rows in all_rows})
        for gated in (False, True)
        for sub in (64, 32)
        for tiling in tilings(rows, gated=gated)
    ]
    for gated, sub, rows, tiling in variants[part::WORKERS]:
        weight = random_weight(1024, 5120, 128, gated=gated, sub=sub)
        try:
            Int4Gemm(weight, None, scratch, overlap=True, tiling=tiling)(
                torch.randn(rows, 5120, device="cuda").bfloat16()
            )
        except OutOfResources:
            continue


def by_cublas(x: torch.Tensor, weight: torch.Tensor, *, gated: bool) -> torch.Tensor:
    """Compute the GEMM of a bfloat16 weight, and the activation."""
    out = F.linear(x, weight)
    return silu_and_mul(out) if gated else out


def measure(num_rows: int, scratch: Int4Workspace, deadline: float) -> tuple[float, float]:
    """Print a line per shape; return the sums of cuBLAS's times and of the best ones."""
    sums, begun = [0.0, 0.0], time.monotonic()
    for index, (rows, columns, gated) in enumerate(SHAPES, 1):
        stop = begun + (deadline - begun) * index / len(SHAPES)
        x = torch.randn(num_rows, columns, device="cuda").bfloat16()
        count = max(3, COLD_BYTES // (2 * rows * columns))
        plain = [torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        cublas = microseconds([partial(by_cublas, x, each, gated=gated) for each in plain])
        del plain
        times = []
        count = max(3, math.ceil(COLD_BYTES / (rows * columns // 2)))
        for sub in (32, 64):
            weights = [random_weight(rows, columns, 128, gated=gated, sub=sub) for _ in range(count)]
            words = [int4_gemm.scale_words(each) for each in weights]
            for tiling in (None, *tilings(num_rows, gated=gated)):
                if time.monotonic() > stop and times:
                    break
                try:
                    gemms = gemms_of(weights, words, tiling, scratch)
                    times.append((microseconds([partial(each, x) for each in gemms]), sub, tiling))
                except OutOfResources:
                    continue
            if num_rows > 64 and sub == 32:
                int4_gemm.MAX_ROWS = 0
                gemms = gemms_of(weights[:3], words[:3], None, scratch)
                times.append((microseconds([partial(each, x) for each in gemms]), sub, "dequantized panels"))
                int4_gemm.MAX_ROWS = 1024
        times.sort(key=lambda each: each[0])
        chosen = next((f"{t:.1f}" for t, sub, tiling in times if tiling is None and sub == 32), "-")
        sums[0] += cublas
        sums[1] += times[0][0]
        gigabytes = rows * columns * (0.5 + 4 / 128) / times[0][0] / 1e3
        name = f"{rows}x{columns}{' gated' if gated else ''}, {num_rows} rows"
        print(f"{name}: cuBLAS {cublas:.1f}, chosen {chosen}, best ({gigabytes:.0f} GB/s):", flush=True)
        for best, sub, tiling in times[:6]:
            print(f"    {best:7.1f} SUB={sub} {tiling}", flush=True)
        seen = {}
        for best, sub, tiling in times:
            seen.setdefault(sub, (best, tiling))
        print(
            "    " + "; ".join(f"best SUB={sub}: {best:.1f} {tiling}" for sub, (best, tiling) in seen.items()),
            flush=True,
        )
    return sums[0], sums[1]


@click.command()
@click.option("--rows", multiple=True, type=click.IntRange(1, 1 << 14), default=(1, 16, 64, 256))
@click.option("--seconds", default=60.0, help="Time for measuring, after compiling.")
@click.option("--warm", type=int, help="Compile a part of the variants and end.")
def main(rows: tuple[int, ...], seconds: float, warm: int | None) -> None:
    """Check and time."""
    if not torch.cuda.is_available():
        raise click.UsageError("this needs an NVIDIA GPU")
    if warm is not None:
        int4_gemm.MAX_ROWS = 1024
        compile_part(warm, rows)
        return
    int4_gemm.MAX_ROWS = 1024
    start = time.monotonic()
    listed = [part for each in rows for part in ("--rows", str(each))]
    workers = [subprocess.Popen([sys.executable, __file__, "--warm", str(part), *listed]) for part in range(WORKERS)]
    scratch = Int4Workspace(torch.device("cuda"))
    right = check(scratch)
    print("compiled:", [worker.wait() for worker in workers], f"{time.monotonic() - start:.0f} s", flush=True)
    begun = time.monotonic()
    for index, num_rows in enumerate(rows):
        cublas, own = measure(num_rows, scratch, begun + seconds * (index + 1) / len(rows))
        step = f"{LAYERS * cublas / 1e3:.2f} ms by cuBLAS, {LAYERS * own / 1e3:.2f} ms by the best tilings"
        print(
            f"== {num_rows} rows: linear layers of {LAYERS} layers: {step} ({time.monotonic() - start:.0f} s)",
            flush=True,
        )
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
