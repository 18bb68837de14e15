"""Check and time every attention backend on this GPU: ``python scripts/attention_speed.py [NAME...]``.

Decode: 256 requests of 272,571 tokens in all; bytes of K and V over time. Prefill: 16 prompts of 1,024 tokens; causal FLOPs over
time. 16 query and 8 KV heads of 128, bfloat16. Decodes are timed as they are served, as replays of a graph; the last column is
what planning one step takes the host.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from minisgl_core.contracts.attention import AttentionBackend, AttentionBatch, AttentionLayer, AttentionSpec
from minisgl_core.kv.page_table import PageTable
from minisgl_core.kv.pool import KVPool, KVPoolSpec
from minisgl_core.plugins.registry import Registry
from minisgl_core.testing.attention_rig import dense_attention

Q_HEADS, KV_HEADS, DIM = 16, 8, 128
PAGE_SIZES = (1, 16, 64, 128, 256)
NUM_CALLS = 20
DEVICE = torch.device("cuda")
LAYER = AttentionLayer(0, DIM**-0.5)


def decode_lengths() -> list[int]:
    """Like the middle of a run over prompts and answers of 100 to 1,024 tokens."""
    numbers = random.Random(0)
    lengths = [numbers.randint(100, 1024) + numbers.randint(1, 1024) for _ in range(256)]
    missing = 272_571 - sum(lengths)
    return [length + missing // 256 + (place < missing % 256) for place, length in enumerate(lengths)]


class Case:
    """A backend with requests in its pool, and one step to run."""

    def __init__(self, backend: type[AttentionBackend], page_size: int, lengths: Sequence[int], num_new: int) -> None:
        """Each request has `num_new` queries; raises ValueError with the reasons where the backend cannot."""
        dtype = torch.bfloat16
        sizes = (Q_HEADS, KV_HEADS, DIM, page_size)
        spec = AttentionSpec(*sizes, dtype, dtype, DEVICE, max_seq_len=40_960, max_batch=len(lengths))
        if reasons := backend.unsupported(spec):
            raise ValueError("; ".join(reasons))
        counts = [-(-length // page_size) for length in lengths]
        num_pages = 1 + sum(counts)
        layout = backend.kv_layout
        pool = KVPool(KVPoolSpec(1, num_pages, page_size, KV_HEADS, DIM, dtype, DEVICE, layout))
        pool.data.normal_()
        table = PageTable(len(lengths), spec.max_seq_len, page_size, DEVICE)
        pages = iter(np.random.default_rng(0).permutation(num_pages - 1) + 1)
        slots = []
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True), 1):
            mine = torch.tensor([int(next(pages)) for _ in range(count)])
            table.data[row, :count] = mine
            positions = torch.arange(length - num_new, length)
            slots.append(mine[positions // page_size] * page_size + positions % page_size)
        lens = np.array(lengths, np.int32)
        starts = torch.arange(0, num_new * (len(lens) + 1), num_new, dtype=torch.int32, device=DEVICE)
        self.batch = AttentionBatch(
            num_decodes=len(lens) if num_new == 1 else 0,
            rows=torch.arange(1, len(lens) + 1, dtype=torch.int32, device=DEVICE),
            cu_seqlens_q=starts,
            seq_lens=torch.tensor(lens, device=DEVICE),
            slots=torch.cat(slots).to(DEVICE),
            q_lens_host=np.full(len(lens), num_new, np.int32),
            seq_lens_host=lens,
        )
        fused = torch.randn(num_new * len(lens), Q_HEADS + 2 * KV_HEADS, DIM, dtype=dtype, device=DEVICE)
        self.inputs = torch.split(fused, [Q_HEADS, KV_HEADS, KV_HEADS], dim=1)
        self.backend, self.pool, self.table, self.num_new = backend(spec, pool, table.data), pool, table, num_new

    def forward(self, plan: object) -> torch.Tensor:
        """One layer."""
        return self.backend.forward(*self.inputs, LAYER, plan)

    def check(self, out: torch.Tensor) -> None:
        """Compare the first and the last request with attention in float64."""
        for place in (0, len(self.batch.rows) - 1):
            length, size = int(self.batch.seq_lens_host[place]), self.pool.spec.page_size
            pages = self.table.data[place + 1, : -(-length // size)].long()
            found = [part[pages] for part in (self.pool.k(0), self.pool.v(0))]
            if self.pool.spec.layout == "HND":
                found = [part.transpose(1, 2) for part in found]
            k, v = (part.flatten(0, 1)[:length].cpu() for part in found)
            queries = slice(place * self.num_new, (place + 1) * self.num_new)
            expected = dense_attention(self.inputs[0][queries].cpu(), k, v, LAYER.scale, None)
            error = (out[queries].cpu().double() - expected).abs().max().item()
            assert error < 3e-2, f"request {place} is off by {error}"


def seconds(run: Callable[[], object]) -> float:
    """Of one call on the device: the median of five times as many calls as go between two events."""
    times = []
    run()
    for _ in range(5):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(NUM_CALLS):
            run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / NUM_CALLS / 1000)
    return float(np.median(times))


def decode_speed(case: Case) -> tuple[float, float]:
    """(TB/s, microseconds to plan)."""
    backend: object = case.backend
    plan = backend.plan_capture(case.batch)  # type: ignore[attr-defined]
    case.check(case.forward(plan))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.forward(plan)
    start = time.perf_counter()
    for _ in range(NUM_CALLS):
        backend.plan_replay(case.batch)  # type: ignore[attr-defined]
    planning = (time.perf_counter() - start) / NUM_CALLS
    graph.replay()
    case.check(out)
    num_bytes = int(case.batch.seq_lens_host.sum()) * 2 * KV_HEADS * DIM * 2
    return num_bytes / seconds(graph.replay) / 1e12, planning * 1e6


def prefill_speed(case: Case) -> float:
    """TFLOP/s."""
    plan = case.backend.plan(case.batch)
    case.check(case.forward(plan))
    flops = sum(4 * Q_HEADS * DIM * length * (length + 1) / 2 for length in case.batch.seq_lens_host.astype(float))
    return float(flops / seconds(lambda: case.forward(plan)) / 1e12)


def main() -> None:
    """Print a row for every backend and page size."""
    registry = Registry.from_environment()
    names = sys.argv[1:] or [name for name in registry.names("attention") if name != "torch"]
    print(f"{torch.cuda.get_device_name()}, {Q_HEADS} query and {KV_HEADS} KV heads of {DIM}, bfloat16")
    print(f"{'backend':<10}{'page':>6}{'decode TB/s':>13}{'plan us':>9}{'prefill TFLOP/s':>17}")
    for name in names:
        backend = registry.load("attention", name)
        for page_size in PAGE_SIZES:
            try:
                decode, planning = decode_speed(Case(backend, page_size, decode_lengths(), 1))
                prefill = prefill_speed(Case(backend, page_size, [1024] * 16, 1024))
            except ValueError as error:
                print(f"{name:<10}{page_size:>6}  {error}")
                continue
            print(f"{name:<10}{page_size:>6}{decode:>13.2f}{planning:>9.0f}{prefill:>17.0f}", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
