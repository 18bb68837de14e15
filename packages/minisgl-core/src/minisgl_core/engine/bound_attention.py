"""Attention of one step, which the model calls per layer."""

from collections.abc import Callable
from typing import Any

import torch

from minisgl_core.contracts.attention import AttentionBackend, AttentionLayer
from minisgl_core.contracts.ops import Rope, RotaryOps


class RopeAndStore:
    """RoPE of a step's queries and keys, fused with the KV store if one kernel does both and the backend permits it."""

    __slots__ = ("_backend", "_rotary", "_slots")

    def __init__(self, backend: AttentionBackend, rotary: RotaryOps, slots: Callable[[], torch.Tensor]) -> None:
        """Bind the kernels, and what `slots` returns: the slots of the step's K and V. It is called only for a fused store."""
        layout = backend.pool.spec.layout
        is_fused = rotary.fuses_store and backend.capabilities.fused_kv_store and layout == "NHD"
        self._backend, self._rotary, self._slots = backend, rotary, slots() if is_fused else None

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, rope: Rope | None
    ) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Apply `rope` to q and k, and its QK norm before it. Return q, k, and True if K and V are stored; see `Attend`."""
        if rope is None:
            return q, k, False
        if self._slots is None:
            return *self._rotary.qk_norm_rope(q, k, rope), False
        pages = self._backend.pool.k(layer.index), self._backend.pool.v(layer.index)
        return self._rotary.qk_norm_rope_kv_store(q, k, v, rope, *pages, self._slots, layer.kv_scales), k, True


class BoundAttention:
    """Attention backend with its plan for one step; see `minisgl_core.contracts.model.Attend`."""

    __slots__ = ("_backend", "_has_fused_rope", "_plan", "_rope_and_store")

    def __init__(self, backend: AttentionBackend, plan: Any, rotary: RotaryOps) -> None:
        self._backend, self._plan = backend, plan
        self._rope_and_store = RopeAndStore(backend, rotary, lambda: backend.kv_slots(plan))
        self._has_fused_rope = backend.capabilities.fused_rope_decode

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, rope: Rope | None = None
    ) -> torch.Tensor:
        backend, plan = self._backend, self._plan
        if rope is not None and self._has_fused_rope and backend.supports_fused_rope(plan, rope):
            return backend.attend_fused_rope(q, k, v, layer, rope, plan)
        q, k, is_stored = self._rope_and_store(q, k, v, layer, rope)
        if not is_stored:
            return backend.forward(q, k, v, layer, plan)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        backend.attend_stored(q, layer, plan, out)
        return out
