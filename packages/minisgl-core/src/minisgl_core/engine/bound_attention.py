"""Attention of one step, which the model calls per layer."""

from typing import Any

import torch

from minisgl_core.contracts.attention import AttentionBackend, AttentionLayer
from minisgl_core.contracts.ops import Rope, RotaryOps


def has_fused_store(backend: AttentionBackend, rotary: RotaryOps) -> bool:
    """Return True if the RoPE kernel of `rotary` stores K and V, so that the backend does not have to."""
    return rotary.fuses_store and backend.capabilities.fused_kv_store and backend.pool.spec.layout == "NHD"


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
    """Apply `rope` to q and k, and the QK norm before it if it has one. Fuse this with the KV store if `slots` is given.

    Args:
        backend: attention backend with the KV pool.
        rotary: kernels that apply RoPE.
        q, k, v, layer, rope: arguments of the model's call; see `minisgl_core.contracts.model.Attend`.
        slots: slots to store K and V in; None if the backend stores them (see `has_fused_store`).

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

    __slots__ = ("_backend", "_has_fused_rope", "_plan", "_rotary", "_slots")

    def __init__(self, backend: AttentionBackend, plan: Any, rotary: RotaryOps) -> None:
        self._backend, self._plan, self._rotary = backend, plan, rotary
        self._slots = backend.kv_slots(plan) if has_fused_store(backend, rotary) else None
        self._has_fused_rope = backend.capabilities.fused_rope_decode

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, rope: Rope | None = None
    ) -> torch.Tensor:
        backend, plan = self._backend, self._plan
        if rope is not None and self._has_fused_rope and backend.supports_fused_rope(plan, rope):
            return backend.attend_fused_rope(q, k, v, layer, rope, plan)
        q, k, is_stored = rope_and_store(backend, self._rotary, q, k, v, layer, rope, self._slots)
        if not is_stored:
            return backend.forward(q, k, v, layer, plan)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        backend.attend_stored(q, layer, plan, out)
        return out
