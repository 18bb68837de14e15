"""FlashInfer: paged decodes on tensor cores, paged prefills by its FlashAttention 2 or, on Hopper and without fp8, 3.

FlashInfer wants a batch's pages as one list, and plans its work on the host. The host knows all lengths, and the device
makes the list from its own page table, so nothing is waited for.

Shape legend: B requests, S tokens a page, M columns of the page table, Hq and Hkv heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from minisgl_backends.attention.requirements import (
    dtypes_unsupported,
    fp8_conversion_missing,
    gpu_missing,
    head_dim_unsupported,
    package_missing,
)
from minisgl_backends.attention.storing import StoringAttention
from minisgl_core.contracts.attention import AttentionBatch, AttentionCapabilities, AttentionLayer, AttentionSpec
from minisgl_core.contracts.kv_cache import KVPages

_DTYPES = (torch.bfloat16, torch.float16)
_HEAD_DIMS = (64, 128, 256)
_INT_WORKSPACE_BYTES = 8 * 2**20  # FlashInfer's own default

Wrappers = dict[int | None, Any]
"""One of FlashInfer's wrappers for every sliding window: a wrapper's plan is for one window."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """A step: its wrappers are planned; None where it has no such requests."""

    num_decodes: int
    slots: torch.Tensor
    decodes: Wrappers | None
    prefills: Wrappers | None


class FlashInferAttention(StoringAttention):
    """Two calls a layer where a batch has both decodes and prefills, one else. Modules compile when first used."""

    capabilities = AttentionCapabilities(fused_kv_store=True, cuda_graphs=True, fp8_kv=True, sliding_windows=True)

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        """Names what is missing of flashinfer, a GPU, a dtype and a head dimension; does not import flashinfer."""
        return [
            *super().unsupported(spec),
            *package_missing("flashinfer", "minisgl-backends[fi]"),
            *gpu_missing(spec.device),
            *dtypes_unsupported(spec, _DTYPES),
            *fp8_conversion_missing(spec),
            *head_dim_unsupported(spec, _HEAD_DIMS),
        ]

    def __init__(self, spec: AttentionSpec, pool: KVPages, page_table: torch.Tensor) -> None:
        super().__init__(spec, pool, page_table)
        import flashinfer  # here: asking must not need it

        from minisgl_backends.kernels import paged

        self._flashinfer, self._paged = flashinfer, paged
        self._windows: tuple[int | None, ...] = (None, *spec.sliding_windows)
        self._workspace = torch.zeros(_workspace_bytes(spec), dtype=torch.uint8, device=spec.device)
        self._decodes = {window: self._decode_wrapper() for window in self._windows}
        self._prefills = {window: self._prefill_wrapper() for window in self._windows}
        self._graphs: dict[int, Wrappers] = {}
        self._graph_pages: torch.Tensor | None = None
        self._plans_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def plan(self, batch: AttentionBatch) -> _Plan:
        """Plan the decodes and the prefills of a step."""
        self._plans_copied.synchronize()
        n = batch.num_decodes
        decodes = prefills = None
        if n:
            decodes = self._decodes
            self._plan_decodes(batch.decodes() if n < batch.num_requests else batch, decodes)
        if n < batch.num_requests:
            prefills = self._prefills
            self._plan_prefills(batch.prefills() if n else batch, prefills)
        self._plans_copied.record()
        return _Plan(n, batch.slots, decodes, prefills)

    def plan_capture(self, batch: AttentionBatch) -> _Plan:
        """Wrappers of their own for each batch size: FlashInfer fixes a graph's launches by it."""
        size = batch.num_requests
        if self._graph_pages is None:
            most_pages = self.spec.max_batch * self.page_table.shape[1]
            self._graph_pages = torch.zeros(most_pages, dtype=torch.int32, device=self.spec.device)
        if size not in self._graphs:
            self._graphs[size] = {window: self._decode_wrapper(size, self._decodes[window]) for window in self._windows}
        self.plan_replay(batch)
        return _Plan(size, batch.slots, self._graphs[size], None)

    def plan_replay(self, batch: AttentionBatch) -> None:
        """Plan anew, into the buffers that the graph reads."""
        self._plans_copied.synchronize()
        self._plan_decodes(batch, self._graphs[batch.num_requests], self._graph_pages)
        self._plans_copied.record()

    def kv_slots(self, plan: _Plan) -> torch.Tensor:
        """See `AttentionBackend`."""
        return plan.slots

    def attend_stored(self, q: torch.Tensor, layer: AttentionLayer, plan: _Plan, out: torch.Tensor) -> None:
        """See `AttentionBackend`."""
        pages = (self.pool.k(layer.index), self.pool.v(layer.index))
        n = plan.num_decodes
        # Planned with a scale of 1, which this factor on the keys turns into the layer's own.
        k_scale, v_scale = layer.scale * layer.kv_scales[0], layer.kv_scales[1]
        if plan.decodes is not None:
            plan.decodes[layer.sliding_window].run(q[:n], pages, out=out[:n], k_scale=k_scale, v_scale=v_scale)
        if plan.prefills is not None:
            plan.prefills[layer.sliding_window].run(q[n:], pages, out=out[n:], k_scale=k_scale, v_scale=v_scale)

    def _plan_decodes(self, batch: AttentionBatch, wrappers: Wrappers, pages: torch.Tensor | None = None) -> None:
        starts, pages, last_lens = self._lay_out(batch, pages)
        for window, wrapper in wrappers.items():
            wrapper.plan(starts, pages, last_lens, *self._shape, **self._options(window))

    def _plan_prefills(self, batch: AttentionBatch, wrappers: Wrappers) -> None:
        starts, pages, last_lens = self._lay_out(batch)
        query_starts = torch.from_numpy(_starts(batch.q_lens_host))
        for window, wrapper in wrappers.items():
            options = self._options(window)
            wrapper.plan(query_starts, starts, pages, last_lens, *self._shape, causal=True, **options)

    def _lay_out(
        self, batch: AttentionBatch, pages: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where each request's pages start, int32 [B + 1], host; all pages, device; tokens in the last one, [B], host."""
        size = self.spec.page_size
        num_pages = -(-batch.seq_lens_host // size)
        starts = _starts(num_pages)
        total = int(starts[-1])
        if pages is None:
            pages = torch.empty(total, dtype=torch.int32, device=self.spec.device)
        self._paged.list_pages(self.page_table, batch.rows, batch.seq_lens, size, int(num_pages.max()), pages)
        last_lens = batch.seq_lens_host - (num_pages - 1) * size
        return torch.from_numpy(starts), pages[:total], torch.from_numpy(last_lens.astype(np.int32))

    @property
    def _shape(self) -> tuple[int, int, int, int]:
        return self.spec.num_q_heads, self.spec.num_kv_heads, self.spec.head_dim, self.spec.page_size

    def _options(self, window: int | None) -> dict[str, Any]:
        left = -1 if window is None else window - 1  # FlashInfer counts the tokens before a query
        return {
            "window_left": left,
            "sm_scale": 1.0,
            "q_data_type": self.spec.dtype,
            "kv_data_type": self.spec.kv_dtype,
        }

    def _decode_wrapper(self, graph_size: int = 0, eager: Any = None) -> Any:
        """A wrapper for any batch; or for a graph of this many requests, sharing the plan buffers of an eager one."""
        make = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper
        if not graph_size:
            return make(self._workspace, "NHD", use_tensor_cores=True, backend="fa2")
        starts = torch.zeros(graph_size + 1, dtype=torch.int32, device=self.spec.device)
        wrapper = make(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=starts,
            paged_kv_indices_buffer=self._graph_pages,
            paged_kv_last_page_len_buffer=starts[:graph_size].clone(),
            backend="fa2",
        )
        # Only one of them is planned a step. 16 MiB for each of dozens of graphs would add up.
        wrapper._int_workspace_buffer = eager._int_workspace_buffer
        wrapper._pin_memory_int_workspace_buffer = eager._pin_memory_int_workspace_buffer
        return wrapper

    def _prefill_wrapper(self) -> Any:
        return self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend="auto")


def _starts(counts: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


def _workspace_bytes(spec: AttentionSpec) -> int:
    """Room for the partial results of split keys, float32 [rows, Hkv, D + 1].

    FlashInfer launches two blocks a processor, or a tile of queries each where that is more. A decode's tile holds 16 to 128
    query heads of one KV head, a prefill's up to 128 pairs of query and head.
    """
    blocks = 2 * torch.cuda.get_device_properties(spec.device).multi_processor_count // spec.num_kv_heads
    group = spec.num_q_heads // spec.num_kv_heads
    tile = 16 if group <= 16 else 64 if group <= 64 else 128
    tiles = -(-spec.max_batch * group // tile) + spec.max_batch
    rows = max(max(blocks, tiles) * tile, blocks * 128)
    return 4 * rows * spec.num_kv_heads * (spec.head_dim + 1) + 2**20
