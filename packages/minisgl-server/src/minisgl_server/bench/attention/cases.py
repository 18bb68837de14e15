"""One step of attention over a pool of random keys and values, with a reference result, and its time.

Shape legend: T new tokens, Hq and Hkv heads, D head dimension.
"""

import timeit
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from minisgl_core.contracts.attention import AttentionBackend, AttentionBatch, AttentionLayer, AttentionSpec
from minisgl_core.contracts.kv_cache import KVPoolSpec
from minisgl_core.kv.page_table import PageTable
from minisgl_core.kv.pool import KVPool
from minisgl_core.testing.attention_rig import TOLERANCES, dense_attention

MIN_MAX_SEQ_LEN = 8192
"""Lower bound of `AttentionSpec.max_seq_len`: the page table of a server is also wider than most requests need."""
NUM_LAYERS = 2
"""Number of layers per step, as the first layer may have work that the others do not."""
CALLS_BETWEEN_EVENTS = 10
"""Calls per timed interval on a GPU, as a single call takes less time than its launch."""


def spread_lengths(count: int, mean: int, spread: float) -> list[int]:
    """Return `count` fixed lengths within ``mean * (1 ± spread)`` that add up to ``count * mean``."""
    random = np.random.default_rng(0)
    half = (1 + spread * random.uniform(-1, 1, count // 2)) * mean
    lengths = half.round().astype(int).tolist()
    mirrored = [2 * mean - length for length in lengths]
    return [max(1, length) for length in (*lengths, *mirrored, *[mean] * (count % 2))]


class Case:
    """Backend with requests in its KV pool, and one step to run."""

    def __init__(
        self, backend: type[AttentionBackend], spec: AttentionSpec, lengths: Sequence[int], num_new: int | None
    ) -> None:
        """Fill the pool. The queries are the last `num_new` tokens of each request, or all of them if it is None."""
        self.spec = spec
        self._layers = [AttentionLayer(index, spec.head_dim**-0.5) for index in range(NUM_LAYERS)]
        size, device = spec.page_size, spec.device
        counts = [-(-length // size) for length in lengths]
        num_pages = 1 + sum(counts)
        sizes = NUM_LAYERS, num_pages, size, spec.num_kv_heads, spec.head_dim
        self._pool = KVPool(KVPoolSpec(*sizes, spec.kv_dtype, device, backend.capabilities.layouts[0]))
        for part in self._pool.data.flatten(0, 1):
            part.copy_(torch.randn(part.shape, dtype=spec.dtype, device=device))
        self._table = PageTable(len(lengths), spec.max_seq_len, size, device)
        pages = torch.from_numpy(np.random.default_rng(0).permutation(num_pages - 1) + 1)
        new = [length if num_new is None else num_new for length in lengths]
        slots = []
        for row, (length, count, queries) in enumerate(zip(lengths, counts, new, strict=True), 1):
            own_pages, pages = pages[:count], pages[count:]
            self._table.data[row, :count] = own_pages
            positions = torch.arange(length - queries, length)
            slots.append(own_pages[positions // size] * size + positions % size)
        starts = np.concatenate(([0], np.cumsum(new)))
        self.batch = AttentionBatch(
            num_decodes=len(lengths) if num_new == 1 else 0,
            rows=torch.arange(1, len(lengths) + 1, dtype=torch.int32, device=device),
            cu_seqlens_q=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            slots=torch.cat(slots).to(device),
            q_lens_host=np.array(new, np.int32),
            seq_lens_host=np.array(lengths, np.int32),
        )
        heads = [spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads]
        fused = torch.randn(sum(new), sum(heads), spec.head_dim, dtype=spec.dtype, device=device)
        self._q, self._k, self._v = torch.split(fused, heads, dim=1)
        self.backend = backend(spec, self._pool, self._table.data)

    def forward(self, plan: object) -> list[torch.Tensor]:
        """Run all layers with the same queries; return [T, Hq, D] per layer."""
        return [self.backend.forward(self._q, self._k, self._v, layer, plan) for layer in self._layers]

    def error(self, outs: Sequence[torch.Tensor]) -> float:
        """Return the maximum error of the first and the last request against float64 attention, relative to the tolerance."""
        ends = np.cumsum(self.batch.q_lens_host)
        requests = {0, len(ends) - 1}
        return max(
            self._error(layer, out, ends, index)
            for layer, out in zip(self._layers, outs, strict=True)
            for index in requests
        )

    def _error(self, layer: AttentionLayer, out: torch.Tensor, ends: np.ndarray, index: int) -> float:
        length, num_new = int(self.batch.seq_lens_host[index]), int(self.batch.q_lens_host[index])
        pages = self._table.data[index + 1, : -(-length // self.spec.page_size)].long()
        # As bytes, since torch cannot index all float8 dtypes.
        bits = [part.view(torch.uint8)[pages] for part in (self._pool.k(layer.index), self._pool.v(layer.index))]
        parts = [part.view(self.spec.kv_dtype) for part in bits]
        if self._pool.spec.layout == "HND":
            parts = [part.transpose(1, 2) for part in parts]
        k, v = (part.flatten(0, 1)[:length].cpu() for part in parts)
        queries = slice(int(ends[index]) - num_new, int(ends[index]))
        expected = dense_attention(self._q[queries].cpu(), k, v, layer)
        error = (out[queries].cpu().double() - expected).abs().max().item()
        return (error if np.isfinite(error) else float("inf")) / TOLERANCES[self.spec.dtype]

    @property
    def num_kv_bytes(self) -> int:
        """Bytes of K and V of all tokens."""
        tokens = int(self.batch.seq_lens_host.astype(np.int64).sum())
        return tokens * 2 * self.spec.num_kv_heads * self.spec.head_dim * self.spec.kv_dtype.itemsize

    @property
    def num_flops(self) -> float:
        """FLOPs of both matmuls, with the causal mask."""
        new, lengths = self.batch.q_lens_host.astype(float), self.batch.seq_lens_host.astype(float)
        pairs = (new * (lengths - new) + new * (new + 1) / 2).sum()
        return float(4 * self.spec.num_q_heads * self.spec.head_dim * pairs)


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
