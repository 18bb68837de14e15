"""Find the fastest tile of Triton's decode attention for a shape on this GPU.

    python scripts/tune_decode.py --head-dim 256 --q-heads 16 --kv-heads 8 --page-size 64

Prints each tile's time and the bandwidth at which it read K and V, fastest first. Each result is compared with that of the tile
that `minisgl_backends.kernels.decode_tile.decode_tile` chooses, and wrong ones are marked. Kernels are compiled by several
processes first.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context

import click
import torch
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench

from minisgl_backends.kernels.decode_tile import DecodeTile, decode_tile
from minisgl_backends.kernels.paged_decode import SplitKVWorkspace, decode
from minisgl_core.contracts.attention import AttentionLayer

KEYS, WARPS, STAGES, PROGRAMS_PER_SM = (16, 32, 64), (2, 4, 8), (2, 3, 4, 5), (1, 2, 3, 4)
SHARED_BYTES = 220_000
"""Shared memory of an SM for the tiles of K and V in flight."""
MAX_ERROR = 0.01
"""Largest relative error (root mean square) against the chosen tile."""
MADE = {"device": "cuda", "dtype": torch.bfloat16}


@dataclass(frozen=True)
class Shape:
    """A batch of decodes.

    Attributes:
        requests: requests in the batch.
        mean_len: mean of their lengths, which are random between half and 1.5 times of it, in tokens.
        window: sliding window in tokens; 0 for none.
    """

    head_dim: int
    q_heads: int
    kv_heads: int
    page_size: int
    requests: int
    mean_len: int
    window: int

    def chosen(self) -> DecodeTile:
        """Return the tile that attention uses today."""
        return decode_tile(self.head_dim, torch.bfloat16, torch.bfloat16, torch.device("cuda"))

    def tiles(self) -> Iterator[DecodeTile]:
        """Yield the tiles whose programs fit into an SM's shared memory together."""
        for keys, warps, stages, programs in itertools.product(KEYS, WARPS, STAGES, PROGRAMS_PER_SM):
            if (stages - 1) * 2 * keys * self.head_dim * 2 * programs <= SHARED_BYTES:
                yield DecodeTile(keys, warps, stages, programs)


class Batch:
    """Inputs of one decode step. The pages of a request are scattered over the pool."""

    def __init__(self, shape: Shape, requests: int) -> None:
        self._shape = shape
        generator = torch.Generator().manual_seed(0)
        low, high = shape.mean_len // 2, shape.mean_len * 3 // 2
        lengths = torch.randint(low, high + 1, (requests,), generator=generator, dtype=torch.int32)
        columns = -(-(high // shape.page_size + 1) // 16) * 16
        pages = torch.randperm(requests * columns, generator=generator, dtype=torch.int32)
        self.num_tokens = int(lengths.clamp(max=shape.window or high).sum())
        self._lengths, self._table = lengths.cuda(), pages.view(requests, columns).cuda()
        self._rows = torch.arange(requests, dtype=torch.int32, device="cuda")
        pool = (requests * columns, shape.page_size, shape.kv_heads, shape.head_dim)
        self._k, self._v = torch.randn(pool, **MADE), torch.randn(pool, **MADE)
        self._q = torch.randn(requests, shape.q_heads, shape.head_dim, **MADE)
        self.out = torch.empty_like(self._q)
        self._layer = AttentionLayer(0, shape.head_dim**-0.5, shape.window or None)

    def call(self, tile: DecodeTile) -> Callable[[], None]:
        """Return the step's attention with this tile, as a function."""
        shape, device = self._shape, self.out.device
        sizes = len(self._q), shape.q_heads, shape.kv_heads, shape.head_dim
        workspace = SplitKVWorkspace.make(*sizes, device, tile.num_programs(device))
        step = self._table, self._rows, self._lengths, self.out, workspace, self._layer, shape.requests, tile
        return lambda: decode(self._q, self._k, self._v, *step)


def compile_some(part: int, parts: int, shape: Shape) -> None:
    """Compile a part of all variants, by running them on little data."""
    batch = Batch(shape, 2)
    kernels = {replace(tile, programs_per_sm=1): tile for tile in (shape.chosen(), *shape.tiles())}
    for tile in list(kernels.values())[part::parts]:
        with suppress(OutOfResources):
            batch.call(tile)()
    torch.cuda.synchronize()


def measure(batch: Batch, tile: DecodeTile, expected: torch.Tensor) -> tuple[float, float]:
    """Return the median milliseconds of one call, and the relative error (root mean square) of its result.

    Raises:
        OutOfResources: the tile does not fit into shared memory.
    """
    call = batch.call(tile)
    batch.out.fill_(torch.nan)
    call()
    error = (batch.out.float() - expected).norm() / expected.norm()
    return float(do_bench(call, warmup=2, rep=15, return_mode="median")), error.item()


@click.command()
@click.option("--head-dim", default=256)
@click.option("--q-heads", default=16)
@click.option("--kv-heads", default=8)
@click.option("--page-size", default=64)
@click.option("--requests", default=256)
@click.option("--mean-len", default=600, help="mean length of the requests, in tokens")
@click.option("--window", default=0, help="sliding window in tokens; 0 for none")
@click.option("--processes", default=min(12, os.cpu_count() or 1), help="processes that compile at the same time")
def main(processes: int, **sizes: int) -> None:
    """Tune for one shape."""
    shape = Shape(**sizes)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_some, range(processes), [processes] * processes, [shape] * processes))
    batch, chosen = Batch(shape, shape.requests), shape.chosen()
    batch.call(chosen)()
    expected, found = batch.out.float(), []
    for tile in dict.fromkeys((*shape.tiles(), chosen)):
        with suppress(OutOfResources):
            found.append((*measure(batch, tile, expected), tile))
    size = batch.num_tokens * 2 * shape.kv_heads * shape.head_dim * 2
    print(f"{torch.cuda.get_device_name()}, {shape}: {size / 1e9:.3f} GB of K and V")
    for ms, error, tile in sorted(found, key=lambda each: each[0]):
        label = " (chosen)" if tile == chosen else "" if error <= MAX_ERROR else f" WRONG: relative error {error:.2g}"
        print(f"{ms * 1e3:8.1f} us {size / ms / 1e9:6.2f} TB/s {tile}{label}")
    sys.exit(any(not error <= MAX_ERROR for _, error, _ in found))


if __name__ == "__main__":
    main()
