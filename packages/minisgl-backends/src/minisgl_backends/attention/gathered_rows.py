"""What backends share whose kernels read a page-table row for each request of the batch.

Shape legend: T queries of B requests, Hq and Hkv heads, D head dimension, P pages of S tokens, M pages of a request.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch

from minisgl_backends.attention.storing import StoringAttention
from minisgl_core.contracts.attention import AttentionBatch, AttentionCapabilities, AttentionLayer, AttentionSpec
from minisgl_core.contracts.kv_cache import KVPages


@dataclass(frozen=True, slots=True)
class RowInputs:
    """What does not change from layer to layer.

    Attributes:
        pages: of each request, int32 [B, M].
        cu_seqlens_q: int32 [B + 1].
        seq_lens: int32 [B].
        cu_seqlens_k: `seq_lens` summed up, int32 [B + 1]; None where the kernels do not read it.
        max_q: most queries of a request.
        max_k: most tokens of a request.
    """

    pages: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_k: torch.Tensor | None
    max_q: int
    max_k: int


@dataclass(frozen=True, slots=True)
class RowPlan:
    """A step: its decodes and its prefills, each a call of its own; None where it has none."""

    num_decodes: int
    slots: torch.Tensor
    decodes: RowInputs | None
    prefills: RowInputs | None


class GatheredRowsAttention(StoringAttention):
    """Gathers the rows of a batch, stores K and V, and calls a kernel for the decodes and one for the prefills.

    They are separate calls because kernels are chosen by the longest run of queries.

    Attributes:
        needs_cu_seqlens_k: see `RowInputs`.
    """

    capabilities = AttentionCapabilities(fused_kv_store=True, cuda_graphs=True, sliding_windows=True)

    needs_cu_seqlens_k: bool

    def __init__(self, spec: AttentionSpec, pool: KVPages, page_table: torch.Tensor) -> None:
        super().__init__(spec, pool, page_table)
        self._graph_pages: torch.Tensor | None = None
        self._graphs: dict[int, RowInputs] = {}

    @abstractmethod
    def attend(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        inputs: RowInputs,
        scale: float,
        window: int | None,
        out: torch.Tensor,
    ) -> None:
        """Causal attention, aligned to each request's last token.

        Args:
            q: [T, Hq, D], any strides but the last.
            k_pages: [P, S, Hkv, D].
            v_pages: like k_pages.
            inputs: which pages and lengths.
            scale: on the scores.
            window: latest tokens that count, a query's own included; None for all.
            out: [T, Hq, D], contiguous.
        """

    def plan(self, batch: AttentionBatch) -> RowPlan:
        """Gather the page table's rows."""
        n = batch.num_decodes
        decodes = self._inputs(batch.decodes()) if n else None
        prefills = self._inputs(batch.prefills()) if n < batch.num_requests else None
        return RowPlan(n, batch.slots, decodes, prefills)

    def plan_capture(self, batch: AttentionBatch) -> RowPlan:
        """A graph reads rows gathered into a fixed place, wide enough for the longest sequence."""
        size = batch.num_requests
        if self._graph_pages is None:
            shape = (self.spec.max_batch, self.page_table.shape[1])
            self._graph_pages = torch.zeros(shape, dtype=torch.int32, device=self.spec.device)
        inputs = RowInputs(
            pages=self._graph_pages[:size],
            cu_seqlens_q=batch.cu_seqlens_q,
            seq_lens=batch.seq_lens,
            cu_seqlens_k=torch.zeros_like(batch.cu_seqlens_q) if self.needs_cu_seqlens_k else None,
            max_q=1,
            max_k=self.spec.max_seq_len,
        )
        self._graphs[size] = inputs
        self.plan_replay(batch)
        return RowPlan(size, batch.slots, inputs, None)

    def plan_replay(self, batch: AttentionBatch) -> None:
        """Gather into the graph's place."""
        inputs = self._graphs[batch.num_requests]
        used = self._columns(batch)
        torch.index_select(self.page_table[:, :used], 0, batch.rows, out=inputs.pages[:, :used])
        if inputs.cu_seqlens_k is not None:
            torch.cumsum(batch.seq_lens, 0, dtype=torch.int32, out=inputs.cu_seqlens_k[1:])

    def _columns(self, batch: AttentionBatch) -> int:
        return -(-int(batch.seq_lens_host.max()) // self.spec.page_size)

    def _inputs(self, batch: AttentionBatch) -> RowInputs:
        cu_seqlens_k = None
        if self.needs_cu_seqlens_k:
            cu_seqlens_k = torch.nn.functional.pad(batch.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        return RowInputs(
            pages=self.page_table[:, : self._columns(batch)].index_select(0, batch.rows),
            cu_seqlens_q=batch.cu_seqlens_q,
            seq_lens=batch.seq_lens,
            cu_seqlens_k=cu_seqlens_k,
            max_q=int(batch.q_lens_host.max()),
            max_k=int(batch.seq_lens_host.max()),
        )

    def kv_slots(self, plan: RowPlan) -> torch.Tensor:
        """See `AttentionBackend`."""
        return plan.slots

    def attend_stored(self, q: torch.Tensor, layer: AttentionLayer, plan: RowPlan, out: torch.Tensor) -> None:
        """See `AttentionBackend`."""
        pages = (self.pool.k(layer.index), self.pool.v(layer.index))
        n = plan.num_decodes
        for part, inputs in ((slice(n), plan.decodes), (slice(n, None), plan.prefills)):
            if inputs is not None:
                self.attend(q[part], *pages, inputs, layer.scale, layer.sliding_window, out[part])
