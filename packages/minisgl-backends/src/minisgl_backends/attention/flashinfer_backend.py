"""FlashInfer: paged decode on tensor cores, paged prefill with its FlashAttention 2 kernels or, on Hopper without FP8, 3.

FlashInfer takes a batch's pages as one list (``paged_kv_indices``) and plans on the CPU. A kernel builds the list from the page
table on the device. The lengths are known on the CPU, so planning reads nothing back from the device. It waits only until the
device has copied the previous plan out of FlashInfer's pinned buffer.

Shape legend: B requests, S tokens per page, M columns of the page table, Hq and Hkv heads, D head dimension.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from minisgl_backends.attention.flashinfer_build import compile_prefill, flashinfer_broken, is_compiled
from minisgl_backends.attention.fused_store import FusedStoreAttention
from minisgl_backends.attention.requirements import fp8_conversion_missing, head_dim_unsupported
from minisgl_backends.requirements import dtype_unsupported, gpu_missing, package_missing
from minisgl_core.contracts.attention import AttentionBatch, AttentionCapabilities, AttentionLayer, AttentionSpec
from minisgl_core.contracts.kv_cache import KVPages

_DTYPES = (torch.bfloat16, torch.float16)
_HEAD_DIMS = (64, 128, 256)

Variant = tuple[int | None, float | None]
"""Sliding window and soft cap of a layer, for which FlashInfer makes a plan."""

Wrappers = dict[Variant, Any]
"""FlashInfer's wrappers, one per variant."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """The planned wrappers of a step; None for decodes or prefills that the step lacks."""

    num_decodes: int
    slots: torch.Tensor
    decodes: Wrappers | None
    prefills: Wrappers | None


class FlashInferAttention(FusedStoreAttention):
    """Attention by FlashInfer: one call per layer for decodes and one for prefills. Its modules compile at first use."""

    capabilities = AttentionCapabilities(
        fused_kv_store=True, cuda_graphs=True, fp8_kv=True, sliding_windows=True, soft_cap=True
    )

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        """Name a missing flashinfer or GPU, and an unsupported dtype or head dimension; see `flashinfer_broken`, too."""
        reasons = [
            *super().unsupported(spec),
            *package_missing("flashinfer", "minisgl-backends[fi]"),
            *gpu_missing(spec.device),
            *dtype_unsupported(spec.dtype, _DTYPES),
            *fp8_conversion_missing(spec),
            *head_dim_unsupported(spec, _HEAD_DIMS),
        ]
        return reasons or flashinfer_broken()

    @classmethod
    def uncompiled(cls, spec: AttentionSpec) -> str:
        """Name the prefill's modules until `compile` has run.

        The decode's modules are not checked, because ``auto`` uses FlashInfer for prefills only (``--attn fi,triton``).
        """
        return "" if is_compiled(spec) else "FlashInfer's prefill"

    @classmethod
    def compile(cls, spec: AttentionSpec) -> None:
        compile_prefill(cls, spec)

    def __init__(self, spec: AttentionSpec, pool: KVPages, page_table: torch.Tensor) -> None:
        super().__init__(spec, pool, page_table)
        import flashinfer  # here, since `unsupported` must work without it

        from minisgl_backends.kernels import paged

        self._flashinfer, self._paged = flashinfer, paged
        windows, caps = (None, *spec.sliding_windows), (None, *spec.soft_caps)
        self._variants: list[Variant] = [(window, cap) for window in windows for cap in caps]
        self._workspace = torch.zeros(_workspace_bytes(spec), dtype=torch.uint8, device=spec.device)
        make_prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        self._decodes = {variant: self._decode_wrapper() for variant in self._variants}
        self._prefills = {variant: make_prefill(self._workspace, "NHD", backend="auto") for variant in self._variants}
        self._graphs: dict[int, Wrappers] = {}
        self._graph_pages: torch.Tensor | None = None
        self._plans_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def plan(self, batch: AttentionBatch) -> _Plan:
        """Plan the decodes and the prefills of a step."""
        self._plans_copied.synchronize()  # FlashInfer writes each plan into one pinned buffer
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
        """Make wrappers for graphs of this batch size: with them, FlashInfer's launches do not depend on the lengths."""
        size = batch.num_requests
        if self._graph_pages is None:
            max_pages = self.spec.max_batch * self.page_table.shape[1]
            self._graph_pages = torch.zeros(max_pages, dtype=torch.int32, device=self.spec.device)
        if size not in self._graphs:
            self._graphs[size] = {each: self._decode_wrapper(size, self._decodes[each]) for each in self._variants}
        self.plan_replay(batch)
        return _Plan(size, batch.slots, self._graphs[size], None)

    def plan_replay(self, batch: AttentionBatch) -> None:
        """Plan into the buffers that the graph reads."""
        self._plans_copied.synchronize()  # see `plan`
        self._plan_decodes(batch, self._graphs[batch.num_requests], self._graph_pages)
        self._plans_copied.record()

    def kv_slots(self, plan: _Plan) -> torch.Tensor:
        return plan.slots

    def attend_stored(self, q: torch.Tensor, layer: AttentionLayer, plan: _Plan, out: torch.Tensor) -> None:
        pages = (self.pool.k(layer.index), self.pool.v(layer.index))
        n = plan.num_decodes
        # Layers with different scales share one plan: it has sm_scale=1, and the layer's scale goes into k_scale.
        k_scale, v_scale = layer.scale * layer.kv_scales[0], layer.kv_scales[1]
        variant = layer.sliding_window, layer.soft_cap
        if plan.decodes is not None:
            plan.decodes[variant].run(q[:n], pages, out=out[:n], k_scale=k_scale, v_scale=v_scale)
        if plan.prefills is not None:
            plan.prefills[variant].run(q[n:], pages, out=out[n:], k_scale=k_scale, v_scale=v_scale)

    def _plan_decodes(self, batch: AttentionBatch, wrappers: Wrappers, pages: torch.Tensor | None = None) -> None:
        indptr, pages, last_page_lens = self._paged_kv(batch, pages)
        for variant, wrapper in wrappers.items():
            wrapper.plan(indptr, pages, last_page_lens, *self._shape, **self._options(variant))

    def _plan_prefills(self, batch: AttentionBatch, wrappers: Wrappers) -> None:
        indptr, pages, last_page_lens = self._paged_kv(batch)
        q_indptr = torch.from_numpy(_indptr(batch.q_lens_host))
        for variant, wrapper in wrappers.items():
            options = self._options(variant)
            wrapper.plan(q_indptr, indptr, pages, last_page_lens, *self._shape, causal=True, **options)

    def _paged_kv(
        self, batch: AttentionBatch, pages: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return FlashInfer's description of the requests' pages.

        Returns:
            Cumulative page counts, int32 [B + 1], on the CPU; all pages, on the device; tokens in each last page, int32 [B],
            on the CPU.
        """
        size = self.spec.page_size
        num_pages = -(-batch.seq_lens_host // size)
        indptr = _indptr(num_pages)
        total = int(indptr[-1])
        if pages is None:
            pages = torch.empty(total, dtype=torch.int32, device=self.spec.device)
        self._paged.list_pages(self.page_table, batch.rows, batch.seq_lens, size, int(num_pages.max()), pages)
        last_page_lens = batch.seq_lens_host - (num_pages - 1) * size
        return torch.from_numpy(indptr), pages[:total], torch.from_numpy(last_page_lens.astype(np.int32))

    @property
    def _shape(self) -> tuple[int, int, int, int]:
        return self.spec.num_q_heads, self.spec.num_kv_heads, self.spec.head_dim, self.spec.page_size

    def _options(self, variant: Variant) -> dict[str, Any]:
        window, soft_cap = variant
        left = -1 if window is None else window - 1  # FlashInfer does not count the query's own token
        return {
            "window_left": left,
            "logits_soft_cap": soft_cap,
            "sm_scale": 1.0,
            "q_data_type": self.spec.dtype,
            "kv_data_type": self.spec.kv_dtype,
        }

    def _decode_wrapper(self, graph_size: int = 0, eager: Any = None) -> Any:
        """Return a decode wrapper for eager steps, or one for a CUDA graph that shares the plan buffers of `eager`.

        Args:
            graph_size: requests of the graph; 0 for an eager wrapper.
            eager: the eager wrapper for the same variant.
        """
        make = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper
        if not graph_size:
            return make(self._workspace, "NHD", use_tensor_cores=True, backend="fa2")
        indptr = torch.zeros(graph_size + 1, dtype=torch.int32, device=self.spec.device)
        wrapper = make(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=self._graph_pages,
            paged_kv_last_page_len_buffer=indptr[:graph_size].clone(),
            backend="fa2",
        )
        # All graphs share the plan buffers of 16 MiB, since only one of them is planned per step.
        wrapper._int_workspace_buffer = eager._int_workspace_buffer
        wrapper._pin_memory_int_workspace_buffer = eager._pin_memory_int_workspace_buffer
        return wrapper


def _indptr(counts: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    indptr = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    return indptr


def _workspace_bytes(spec: AttentionSpec) -> int:
    """Return the size of FlashInfer's float workspace for split-KV partial outputs, float32 [rows, Hkv, D + 1].

    FlashInfer launches two thread blocks per SM, or one per tile of queries if there are more tiles. A decode's tile holds 16
    to 128 query heads of one KV head, a prefill's up to 128 (query, head) pairs.
    """
    blocks = 2 * torch.cuda.get_device_properties(spec.device).multi_processor_count // spec.num_kv_heads
    group = spec.num_q_heads // spec.num_kv_heads
    tile = 16 if group <= 16 else 64 if group <= 64 else 128
    tiles = -(-spec.max_batch * group // tile) + spec.max_batch
    rows = max(max(blocks, tiles) * tile, blocks * 128)
    # 1 MiB of slack: FlashInfer rounds the rows up to whole queries, at most Hq * (D + 1) floats, and aligns to 16 bytes.
    return 4 * rows * spec.num_kv_heads * (spec.head_dim + 1) + 2**20
