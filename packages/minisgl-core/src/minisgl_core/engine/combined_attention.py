"""``--attn a,b``: one backend for prefills, another for decodes."""

from __future__ import annotations

from typing import Any

import torch

from minisgl_core.contracts.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionLayer,
    AttentionSpec,
    GraphCapturable,
)
from minisgl_core.kv.pool import KVPool


class CombinedAttention(AttentionBackend):
    """Splits each batch at its first prefill.

    Each part stores its own K and V before it attends. That is enough: only prefills share pages that are written in the
    same step, and only with prefills.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        pool: KVPool,
        page_table: torch.Tensor,
        prefill: AttentionBackend,
        decode: AttentionBackend,
    ) -> None:
        super().__init__(spec, pool, page_table)
        self._prefill, self._decode = prefill, decode

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        """It can what its parts can; they are asked."""
        return []

    def plan(self, batch: AttentionBatch) -> Any:
        """(number of decodes, decode plan or None, prefill plan or None)."""
        num_decodes = batch.num_decodes
        decode = self._decode.plan(batch.decodes()) if num_decodes else None
        prefill = self._prefill.plan(batch.prefills()) if num_decodes < batch.num_requests else None
        return num_decodes, decode, prefill

    def plan_capture(self, batch: AttentionBatch) -> Any:
        """Graphs hold decodes alone."""
        assert isinstance(self._decode, GraphCapturable)
        return batch.num_decodes, self._decode.plan_capture(batch), None

    def plan_replay(self, batch: AttentionBatch) -> None:
        """See `GraphCapturable`."""
        assert isinstance(self._decode, GraphCapturable)
        self._decode.plan_replay(batch)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, plan: Any
    ) -> torch.Tensor:
        n, decode, prefill = plan
        if prefill is None:
            return self._decode.forward(q, k, v, layer, decode)
        if decode is None:
            return self._prefill.forward(q, k, v, layer, prefill)
        first = self._decode.forward(q[:n], k[:n], v[:n], layer, decode)
        return torch.cat((first, self._prefill.forward(q[n:], k[n:], v[n:], layer, prefill)))
