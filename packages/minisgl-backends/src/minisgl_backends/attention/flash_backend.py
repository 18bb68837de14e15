"""FlashAttention: whichever version is installed and has kernels for the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from minisgl_backends.attention.flash_versions import VERSIONS, FlashInputs, FlashVersion
from minisgl_backends.attention.requirements import dtypes_unsupported, gpu_missing, head_dim_unsupported
from minisgl_core.contracts.attention import AttentionBackend, AttentionBatch, AttentionLayer, AttentionSpec
from minisgl_core.kv.pool import KVPool

_DTYPES = (torch.bfloat16, torch.float16)
_HEAD_DIMS = (64, 96, 128, 256)


@dataclass(frozen=True, slots=True)
class _Plan:
    """A step: its decodes and its prefills, each a call of its own; None where it has none."""

    num_decodes: int
    slots: torch.Tensor
    decodes: FlashInputs | None
    prefills: FlashInputs | None


class FlashAttention(AttentionBackend):
    """Decodes and prefills are separate calls, because kernels are chosen by the longest run of queries.

    Attributes:
        versions: that may be picked; all of them.
        version: the one picked, such as ``3 (flash_attn_interface)``.
    """

    versions: ClassVar[tuple[FlashVersion, ...]] = VERSIONS

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        """Names what is missing of a GPU, a version that fits, a dtype and a head dimension; imports none of them."""
        reasons = gpu_missing(spec.device)
        if not reasons:
            reasons += cls._pick(spec)[1]
        return [*reasons, *dtypes_unsupported(spec, _DTYPES), *head_dim_unsupported(spec, _HEAD_DIMS)]

    @classmethod
    def _pick(cls, spec: AttentionSpec) -> tuple[FlashVersion | None, list[str]]:
        """The first version that fits, or why none does."""
        major, _ = torch.cuda.get_device_capability(spec.device)
        installed = [version for version in cls.versions if version.is_installed()]
        if not installed:
            commands = "pip install 'minisgl-backends[fa4]' on Hopper and later, 'minisgl-backends[fa]' before"
            return None, [f"no version of FlashAttention is installed ({commands})"]
        reasons = []
        for version in installed:
            problems = version.unsupported(spec, major)
            if not problems:
                return version, []
            reasons += problems
        return None, reasons

    def __init__(self, spec: AttentionSpec, pool: KVPool, page_table: torch.Tensor) -> None:
        super().__init__(spec, pool, page_table)
        from minisgl_backends.kernels import paged  # here: asking must not need triton

        picked, reasons = self._pick(spec)
        assert picked is not None, reasons
        self.version = str(picked)
        self._picked, self._run, self._store_kv = picked, picked.load(), paged.store_kv
        self._graph_pages: torch.Tensor | None = None
        self._graphs: dict[int, FlashInputs] = {}

    def plan(self, batch: AttentionBatch) -> _Plan:
        """Gather the page table's rows."""
        n = batch.num_decodes
        decodes = self._inputs(batch.decodes()) if n else None
        prefills = self._inputs(batch.prefills()) if n < batch.num_requests else None
        return _Plan(n, batch.slots, decodes, prefills)

    def plan_capture(self, batch: AttentionBatch) -> _Plan:
        """A graph reads rows gathered into a fixed place, wide enough for the longest sequence."""
        size = batch.num_requests
        if self._graph_pages is None:
            shape = (self.spec.max_batch, self.page_table.shape[1])
            self._graph_pages = torch.zeros(shape, dtype=torch.int32, device=self.spec.device)
        inputs = FlashInputs(
            pages=self._graph_pages[:size],
            cu_seqlens_q=batch.cu_seqlens_q,
            seq_lens=batch.seq_lens,
            cu_seqlens_k=torch.zeros_like(batch.cu_seqlens_q) if self._picked.needs_cu_seqlens_k else None,
            max_q=1,
            max_k=self.spec.max_seq_len,
        )
        self._graphs[size] = inputs
        self.plan_replay(batch)
        return _Plan(size, batch.slots, inputs, None)

    def plan_replay(self, batch: AttentionBatch) -> None:
        """Gather into the graph's place."""
        inputs = self._graphs[batch.num_requests]
        used = self._columns(batch)
        torch.index_select(self.page_table[:, :used], 0, batch.rows, out=inputs.pages[:, :used])
        if inputs.cu_seqlens_k is not None:
            torch.cumsum(batch.seq_lens, 0, dtype=torch.int32, out=inputs.cu_seqlens_k[1:])

    def _columns(self, batch: AttentionBatch) -> int:
        return -(-int(batch.seq_lens_host.max()) // self.spec.page_size)

    def _inputs(self, batch: AttentionBatch) -> FlashInputs:
        cu_seqlens_k = None
        if self._picked.needs_cu_seqlens_k:
            cu_seqlens_k = torch.nn.functional.pad(batch.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        return FlashInputs(
            pages=self.page_table[:, : self._columns(batch)].index_select(0, batch.rows),
            cu_seqlens_q=batch.cu_seqlens_q,
            seq_lens=batch.seq_lens,
            cu_seqlens_k=cu_seqlens_k,
            max_q=int(batch.q_lens_host.max()),
            max_k=int(batch.seq_lens_host.max()),
        )

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, plan: _Plan
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        pages = (self.pool.k(layer.index), self.pool.v(layer.index))
        self._store_kv(k, v, *pages, plan.slots)
        n = plan.num_decodes
        parts = [
            self._run(part, *pages, inputs, layer.scale, layer.sliding_window)
            for part, inputs in ((q[:n], plan.decodes), (q[n:], plan.prefills))
            if inputs is not None
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
