"""Attention of one step, which the model calls per layer."""

from typing import Any

import torch

from minisgl_core.contracts.attention import AttentionBackend, AttentionLayer
from minisgl_core.contracts.ops import Rope, RotaryOps


def fused_store_backend(backend: AttentionBackend, rotary: RotaryOps) -> AttentionBackend | None:
    """Return the backend if `rotary` can store K and V fused with RoPE instead of the backend; None otherwise."""
    fuses = rotary.fuses_store and backend.pool.spec.layout == "NHD"
    return backend if fuses and backend.capabilities.fused_kv_store else None


def rope_and_store(
    backend: AttentionBackend,
    rotary: RotaryOps,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: AttentionLayer,
    rope: Rope | None,
    slots: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Apply RoPE to q and k, after the QK norm if `rope` has one, fused with the KV store if `slots` is given.

    Args:
        backend: attention backend with the KV pool.
        rotary: kernels that apply RoPE.
        q: see `Attend`.
        k: see `Attend`.
        v: see `Attend`.
        layer: see `Attend`.
        rope: see `Attend`; None if the model applies no RoPE here.
        slots: slots to store K and V in; None if the backend stores them (see `fused_store_backend`).

    Returns:
        q, k, and True if K and V are stored.
    """
    if rope is None:
        return q, k, False
    if slots is None:
        return *rotary.qk_norm_rope(q, k, rope), False
    pages = backend.pool.k(layer.index), backend.pool.v(layer.index)
    return rotary.qk_norm_rope_kv_store(q, k, v, rope, *pages, slots, layer.kv_scales), k, True


class BoundAttention:
    """Attention backend with its plan for one step; see `minisgl_core.contracts.model.Attend`."""

    __slots__ = ("_backend", "_fused_rope", "_fused_store", "_plan", "_rotary", "_slots")

    def __init__(self, backend: AttentionBackend, plan: Any, rotary: RotaryOps) -> None:
        self._backend, self._plan, self._rotary = backend, plan, rotary
        self._fused_store = fused_store_backend(backend, rotary)
        self._slots = None if self._fused_store is None else self._fused_store.kv_slots(plan)
        self._fused_rope = backend if backend.capabilities.fused_rope_decode else None

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        rope: Rope | None = None,
    ) -> torch.Tensor:
        if rope is not None and self._fused_rope is not None and self._fused_rope.supports_fused_rope(self._plan, rope):
            return self._fused_rope.attend_fused_rope(q, k, v, layer, rope, self._plan)
        q, k, is_stored = rope_and_store(self._backend, self._rotary, q, k, v, layer, rope, self._slots)
        if is_stored and self._fused_store is not None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            self._fused_store.attend_stored(q, layer, self._plan, out)
            return out
        return self._backend.forward(q, k, v, layer, self._plan)
