"""Base class of backends with `AttentionCapabilities.fused_kv_store`."""

from typing import Any

import torch

from minisgl_core.contracts.attention import AttentionBackend, AttentionLayer, AttentionSpec
from minisgl_core.contracts.kv_cache import KVPages


class FusedStoreAttention(AttentionBackend):
    """Attention over stored K and V.

    `forward` stores K and V, and then calls `attend_stored`. After a fused kernel that stores them (RoPE + KV store), callers use
    `attend_stored` alone.
    """

    def __init__(self, spec: AttentionSpec, pool: KVPages, page_table: torch.Tensor) -> None:
        super().__init__(spec, pool, page_table)
        from minisgl_backends.kernels import paged  # here, since `unsupported` must work without triton

        self._store_kv = paged.store_kv

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, plan: Any
    ) -> torch.Tensor:
        pages = self.pool.k(layer.index), self.pool.v(layer.index)
        self._store_kv(k, v, *pages, self.kv_slots(plan), layer.kv_scales)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.attend_stored(q, layer, plan, out)
        return out
