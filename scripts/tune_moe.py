"""Find the fastest tiles of the Triton MoE kernels for a shape on this GPU, and how they compare with memory bandwidth.

    python scripts/tune_moe.py --experts 128 --top-k 8 --hidden 2048 --intermediate 768

Prints the fastest tiles of both GEMMs per number of tokens and block size. Beside their time is the bandwidth at which the
experts' weights were read. Kernels are compiled by several processes first, which fill Triton's cache.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context

import click
import torch
import triton

from minisgl_backends.moe.sorted_blocks import sort_into_blocks
from minisgl_backends.moe.tiles import Tiles
from minisgl_backends.moe.triton_grouped import grouped_gemm

TOKENS = (1, 8, 32, 64, 128, 256, 512, 2048, 8192)
BLOCK_SIZES = (16, 32, 64, 128)
TILES = [
    Tiles(cols, depth, warps, stages)
    for cols, depth, warps, stages in itertools.product((64, 128, 256), (64, 128), (4, 8), (3, 4, 5))
    if cols * depth <= 128 * 128
]
MADE = {"device": "cuda", "dtype": torch.bfloat16}


def inputs(tokens: int, shape: tuple[int, int, int, int]) -> dict[str, torch.Tensor]:
    """Return random activations and expert ids."""
    experts, top_k, hidden, inner = shape
    return {
        "x": torch.randn(tokens, hidden, **MADE),
        "ids": torch.rand(tokens, experts, device="cuda").topk(top_k)[1],
        "weights": torch.rand(tokens, top_k, device="cuda"),
        "hidden": torch.randn(tokens * top_k, inner, **MADE),
        "rows": torch.empty(tokens * top_k, hidden, **MADE),
    }


def calls(
    given: dict, gate_up: torch.Tensor, down: torch.Tensor, experts: int, block_size: int, tiles: Tiles
) -> dict[str, Callable[[], object]]:
    """Return both GEMMs as functions, by name."""
    blocks = sort_into_blocks(given["ids"], experts, block_size)
    top_k = given["ids"].shape[1]
    unscaled = None, None, None  # scales, zero points and bias
    x, hidden, weights, rows = (given[name] for name in ("x", "hidden", "weights", "rows"))
    return {
        "gate_up": lambda: grouped_gemm(
            x, None, gate_up, *unscaled, hidden, blocks, tiles, top_k=top_k, activation="silu"
        ),
        "down": lambda: grouped_gemm(hidden, None, down, *unscaled, rows, blocks, tiles, row_weights=weights),
    }


def compile_some(part: int, parts: int, shape: tuple[int, int, int, int]) -> None:
    """Compile a part of all variants, by running them on little data."""
    experts, _, hidden, inner = shape
    given = inputs(4, shape)
    gate_up, down = torch.zeros(experts, 2 * inner, hidden, **MADE), torch.zeros(experts, hidden, inner, **MADE)
    for block_size, tiles in list(itertools.product(BLOCK_SIZES, TILES))[part::parts]:
        for call in calls(given, gate_up, down, experts, block_size, tiles).values():
            with suppress(triton.runtime.errors.OutOfResources):
                call()


@click.command()
@click.option("--experts", default=128)
@click.option("--top-k", default=8)
@click.option("--hidden", default=2048)
@click.option("--intermediate", default=768)
@click.option("--processes", default=min(12, os.cpu_count() or 1), help="processes that compile at the same time")
@click.option("--json", "path", type=click.Path(dir_okay=False), help="file for all times")
def main(experts: int, top_k: int, hidden: int, intermediate: int, processes: int, path: str | None) -> None:
    """Tune for one shape."""
    shape = (experts, top_k, hidden, intermediate)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_some, range(processes), [processes] * processes, [shape] * processes))
    gate_up = torch.randn(experts, 2 * intermediate, hidden, **MADE) * 0.02
    down = torch.randn(experts, hidden, intermediate, **MADE) * 0.02
    results = []
    for tokens in TOKENS:
        given = inputs(tokens, shape)
        hit = given["ids"].unique().numel()
        best: dict[tuple[str, int], tuple[float, Tiles]] = {}
        for block_size, tiles in itertools.product(BLOCK_SIZES, TILES):
            rows = tokens * top_k / experts
            if not rows / 4 <= block_size <= max(16, 4 * rows):
                continue
            try:
                for name, call in calls(given, gate_up, down, experts, block_size, tiles).items():
                    ms = triton.testing.do_bench(call, warmup=2, rep=12, return_mode="median")
                    results.append(
                        {"tokens": tokens, "block": block_size, "gemm": name, "ms": ms, "tiles": repr(tiles)}
                    )
                    if ms < best.get((name, block_size), (1e9, tiles))[0]:
                        best[name, block_size] = (ms, tiles)
            except triton.runtime.errors.OutOfResources:
                continue
        for (name, block_size), (ms, tiles) in sorted(best.items()):
            size = hit * hidden * intermediate * 2 * (2 if name == "gate_up" else 1)
            tflops = 2 * tokens * top_k * hidden * intermediate * (2 if name == "gate_up" else 1) / ms / 1e9
            speed = f"{ms * 1e3:8.1f} us {size / ms / 1e9:6.2f} TB/s {tflops:6.0f} TFLOP/s"
            print(f"T {tokens:5} block {block_size:3} {name:8} {speed} {tiles}", flush=True)
    if path:
        with open(path, "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    sys.exit(main())
