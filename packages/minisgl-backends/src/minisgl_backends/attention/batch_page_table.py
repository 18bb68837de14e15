"""Base class of backends whose kernels take a page table with one row per request of the batch (vLLM's block table).

Shape legend: T queries of B requests, Hq and Hkv heads, D head dimension, P pages of S tokens, M pages of a request.
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch

from minisgl_backends.attention.fused_store import FusedStoreAttention
from minisgl_core.contracts.attention import AttentionBatch, AttentionCapabilities, AttentionLayer, AttentionSpec
from minisgl_core.contracts.kv_cache import KVPages


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Kernel arguments that all layers of a step share.

    Attributes:
        page_table: pages of each request of the batch, int32 [B, M].
        cu_seqlens_q: cumulative query counts, int32 [B + 1].
        seq_lens: tokens per request, int32 [B].
        cu_seqlens_k: cumulative `seq_lens`, int32 [B + 1]; None if the kernels do not read it.
        max_seqlen_q: largest number of queries of a request.
        max_seqlen_k: largest number of tokens of a request.
    """

    page_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_k: torch.Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass(frozen=True, slots=True)
class BatchPageTablePlan:
    """Metadata of a step: decodes and prefills are separate kernel calls; None for a kind that the step lacks."""

    num_decodes: int
    slots: torch.Tensor
    decodes: AttentionMetadata | None
    prefills: AttentionMetadata | None


class BatchPageTableAttention(FusedStoreAttention):
    """Attention by library kernels whose page table has the rows of the batch. `plan` gathers these from the engine's page table.

    `forward` stores K and V, and calls the kernel once for decodes and once for prefills. The calls are separate because the
    libraries select a kernel by the largest number of queries.

    Attributes:
        needs_cu_seqlens_k: see `AttentionMetadata`.
    """

    capabilities = AttentionCapabilities(fused_kv_store=True, cuda_graphs=True, sliding_windows=True)

    needs_cu_seqlens_k: bool

    def __init__(self, spec: AttentionSpec, pool: KVPages, page_table: torch.Tensor) -> None:
        super().__init__(spec, pool, page_table)
        self._graph_page_table: torch.Tensor | None = None
        self._graphs: dict[int, AttentionMetadata] = {}

    @abstractmethod
    def attend(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        out: torch.Tensor,
    ) -> None:
        """Compute causal attention; a request's queries are its last tokens.

        Args:
            q: [T, Hq, D], contiguous in the last dimension.
            k_pages: [P, S, Hkv, D].
            v_pages: like k_pages.
            metadata: pages and lengths.
            scale: factor on the scores.
            window: sliding window in tokens, the query's own included; None for none.
            out: [T, Hq, D], contiguous.
        """

    def plan(self, batch: AttentionBatch) -> BatchPageTablePlan:
        """Gather the page-table rows of the batch."""
        n = batch.num_decodes
        decodes = self._metadata(batch.decodes()) if n else None
        prefills = self._metadata(batch.prefills()) if n < batch.num_requests else None
        return BatchPageTablePlan(n, batch.slots, decodes, prefills)

    def plan_capture(self, batch: AttentionBatch) -> BatchPageTablePlan:
        """Point the captured kernels at a static page table, wide enough for the longest sequence."""
        size = batch.num_requests
        if self._graph_page_table is None:
            shape = (self.spec.max_batch, self.page_table.shape[1])
            self._graph_page_table = torch.zeros(shape, dtype=torch.int32, device=self.spec.device)
        metadata = AttentionMetadata(
            page_table=self._graph_page_table[:size],
            cu_seqlens_q=batch.cu_seqlens_q,
            seq_lens=batch.seq_lens,
            cu_seqlens_k=torch.zeros_like(batch.cu_seqlens_q) if self.needs_cu_seqlens_k else None,
            max_seqlen_q=1,
            max_seqlen_k=self.spec.max_seq_len,
        )
        self._graphs[size] = metadata
        self.plan_replay(batch)
        return BatchPageTablePlan(size, batch.slots, metadata, None)

    def plan_replay(self, batch: AttentionBatch) -> None:
        """Update the static tensors that the graph reads."""
        metadata = self._graphs[batch.num_requests]
        used = self._max_pages(batch)
        torch.index_select(self.page_table[:, :used], 0, batch.rows, out=metadata.page_table[:, :used])
        if metadata.cu_seqlens_k is not None:
            torch.cumsum(batch.seq_lens, 0, dtype=torch.int32, out=metadata.cu_seqlens_k[1:])

    def _max_pages(self, batch: AttentionBatch) -> int:
        return -(-int(batch.seq_lens_host.max()) // self.spec.page_size)

    def _metadata(self, batch: AttentionBatch) -> AttentionMetadata:
        cu_seqlens_k = None
        if self.needs_cu_seqlens_k:
            cu_seqlens_k = torch.nn.functional.pad(batch.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        return AttentionMetadata(
            page_table=self.page_table[:, : self._max_pages(batch)].index_select(0, batch.rows),
            cu_seqlens_q=batch.cu_seqlens_q,
            seq_lens=batch.seq_lens,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=int(batch.q_lens_host.max()),
            max_seqlen_k=int(batch.seq_lens_host.max()),
        )

    def kv_slots(self, plan: BatchPageTablePlan) -> torch.Tensor:
        return plan.slots

    def attend_stored(
        self, q: torch.Tensor, layer: AttentionLayer, plan: BatchPageTablePlan, out: torch.Tensor
    ) -> None:
        pages = (self.pool.k(layer.index), self.pool.v(layer.index))
        n = plan.num_decodes
        for tokens, metadata in ((slice(n), plan.decodes), (slice(n, None), plan.prefills)):
            if metadata is not None:
                self.attend(q[tokens], *pages, metadata, layer.scale, layer.sliding_window, out[tokens])
