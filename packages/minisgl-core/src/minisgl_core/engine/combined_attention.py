"""``--attn a,b``: one attention backend for prefills and one for decodes."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from minisgl_core.contracts.attention import AttentionBackend, AttentionBatch, AttentionLayer, AttentionSpec
from minisgl_core.contracts.kv_cache import KVPages
from minisgl_core.contracts.ops import Rope


@dataclass(frozen=True, slots=True)
class _Plan:
    """Plans of both backends for one step; None for a part that the step does not have."""

    num_decode_tokens: int
    slots: torch.Tensor
    decode: Any
    prefill: Any


class CombinedAttention(AttentionBackend):
    """Attention backend that splits each batch at its first prefill.

    Each part stores its own K and V before it attends. This is sufficient: pages that a step writes are shared only among its
    prefills.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        pool: KVPages,
        page_table: torch.Tensor,
        prefill: AttentionBackend,
        decode: AttentionBackend,
    ) -> None:
        super().__init__(spec, pool, page_table)
        self._prefill, self._decode = prefill, decode
        stores = prefill.capabilities.fused_kv_store and decode.capabilities.fused_kv_store
        self.capabilities = replace(decode.capabilities, fused_kv_store=stores)

    def plan(self, batch: AttentionBatch) -> _Plan:
        num_decodes = batch.num_decodes
        decode = self._decode.plan(batch.decodes()) if num_decodes else None
        prefill = self._prefill.plan(batch.prefills()) if num_decodes < batch.num_requests else None
        return _Plan(batch.num_decode_tokens, batch.slots, decode, prefill)

    def plan_capture(self, batch: AttentionBatch) -> _Plan:
        """Plan a capture with the backend for decodes, since only CUDA graphs of decode steps contain attention."""
        return _Plan(batch.num_decode_tokens, batch.slots, self._decode.plan_capture(batch), None)

    def plan_replay(self, batch: AttentionBatch) -> None:
        self._decode.plan_replay(batch)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, plan: _Plan
    ) -> torch.Tensor:
        n = plan.num_decode_tokens
        if plan.prefill is None:
            return self._decode.forward(q, k, v, layer, plan.decode)
        if plan.decode is None:
            return self._prefill.forward(q, k, v, layer, plan.prefill)
        first = self._decode.forward(q[:n], k[:n], v[:n], layer, plan.decode)
        return torch.cat((first, self._prefill.forward(q[n:], k[n:], v[n:], layer, plan.prefill)))

    def supports_fused_rope(self, plan: _Plan, rope: Rope) -> bool:
        """Return True for a step of decodes only whose backend applies RoPE itself."""
        return plan.prefill is None and self._decode.supports_fused_rope(plan.decode, rope)

    def attend_fused_rope(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, rope: Rope, plan: _Plan
    ) -> torch.Tensor:
        return self._decode.attend_fused_rope(q, k, v, layer, rope, plan.decode)

    def kv_slots(self, plan: _Plan) -> torch.Tensor:
        return plan.slots

    def attend_stored(self, q: torch.Tensor, layer: AttentionLayer, plan: _Plan, out: torch.Tensor) -> None:
        prefill, decode, n = self._prefill, self._decode, plan.num_decode_tokens
        if plan.decode is not None:
            decode.attend_stored(q[:n], layer, plan.decode, out[:n])
        if plan.prefill is not None:
            prefill.attend_stored(q[n:], layer, plan.prefill, out[n:])
