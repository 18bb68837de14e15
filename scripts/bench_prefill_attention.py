"""Prefill attention on a GPU: device time of a layer, in a CUDA graph, and host time of a launch.

    python scripts/bench_prefill_attention.py [--prompts 16x1024 --heads 40x8 --page-size 16]

`minisgl bench attention` checks the results, and also times the other providers, but by launches from Python.
"""

from collections.abc import Iterator
from itertools import product
from time import perf_counter

import click
import numpy as np
import torch
from triton.testing import do_bench_cudagraph

from minisgl_backends.attention.hopper_backend import HopperAttention
from minisgl_backends.attention.triton_backend import TritonAttention
from minisgl_core.contracts.attention import AttentionBatch, AttentionLayer, AttentionSpec
from minisgl_core.contracts.kv_cache import KVPoolSpec
from minisgl_core.kv.pool import KVPool
from minisgl_core.utils.fp8 import FP8

DEVICE = torch.device("cuda")
NUM_LAUNCHES = 100


def times_us(
    provider: type[TritonAttention],
    lengths: list[int],
    heads: tuple[int, int],
    dim: int,
    page_size: int,
    kv_dtype: torch.dtype,
    window: int | None,
) -> Iterator[float]:
    """Yield the microseconds of the device, then of a launch on the host."""
    pages = -(-max(lengths) // page_size)
    table = torch.arange(pages * (len(lengths) + 1), dtype=torch.int32, device=DEVICE).view(-1, pages)
    pool = KVPool(KVPoolSpec(1, table.numel(), page_size, heads[1], dim, kv_dtype, DEVICE))
    pool.data.copy_(torch.randn_like(pool.data, dtype=torch.bfloat16))
    spec = AttentionSpec(
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=dim,
        page_size=page_size,
        max_batch=len(lengths),
        max_seq_len=max(lengths),
        dtype=torch.bfloat16,
        kv_dtype=kv_dtype,
        device=DEVICE,
        sliding_windows=() if window is None else (window,),
    )
    backend = provider(spec, pool, table)
    host = np.array(lengths, np.int32)
    batch = AttentionBatch(
        num_decodes=0,
        rows=torch.arange(1, len(lengths) + 1, dtype=torch.int32, device=DEVICE),
        cu_seqlens_q=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=DEVICE),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        slots=torch.zeros(sum(lengths), dtype=torch.int64, device=DEVICE),
        q_lens_host=host,
        seq_lens_host=host,
    )
    q = torch.randn(sum(lengths), heads[0], dim, dtype=torch.bfloat16, device=DEVICE)
    layer, plan, out = AttentionLayer(0, dim**-0.5, window), backend.plan(batch), torch.empty_like(q)

    def attend() -> None:
        backend.attend_stored(q, layer, plan, out)

    yield float(do_bench_cudagraph(attend, return_mode="median")) * 1e3
    torch.cuda.synchronize()
    start = perf_counter()
    for _ in range(NUM_LAUNCHES):
        attend()
    yield (perf_counter() - start) / NUM_LAUNCHES * 1e6
    torch.cuda.synchronize()


@click.command(help=__doc__)
@click.option("--prompts", multiple=True, default=("1x512", "16x1024", "64x256", "1x8192"))
@click.option("--heads", "all_heads", multiple=True, default=("40x8", "16x8", "32x4"))
@click.option("--dim", type=int, default=128)
@click.option("--page-size", "page_sizes", type=int, multiple=True, default=(16, 64))
@click.option("--fp8-kv", is_flag=True)
@click.option("--window", type=int, help="Sliding window in tokens. TFLOP/s then count the visible keys alone.")
@torch.inference_mode()
def main(
    prompts: tuple[str, ...],
    all_heads: tuple[str, ...],
    dim: int,
    page_sizes: tuple[int, ...],
    fp8_kv: bool,
    window: int | None,
) -> None:
    """See the module's text."""
    print(torch.cuda.get_device_name())
    for heads, each, page_size in product(all_heads, prompts, page_sizes):
        (count, length), (q_heads, kv_heads) = (map(int, pair.split("x")) for pair in (each, heads))
        seen = min(window or length, length)
        operations = 4 * q_heads * dim * count * (seen * (seen + 1) // 2 + (length - seen) * seen)
        for name, provider in (("hopper", HopperAttention), ("triton", TritonAttention)):
            kv_dtype = FP8 if fp8_kv else torch.bfloat16
            device, host = times_us(provider, [length] * count, (q_heads, kv_heads), dim, page_size, kv_dtype, window)
            rate = operations / device / 1e6
            print(
                f"{heads:6} {each:8} pages of {page_size:3} {name}: {device:8.1f} us, {rate:4.0f} TFLOP/s, host {host:5.1f} us"
            )


if __name__ == "__main__":
    main()
