"""Attention of one step, as the model calls it."""

from __future__ import annotations

from typing import Any

import torch

from minisgl_core.contracts.attention import AttentionBackend, AttentionLayer
from minisgl_core.contracts.ops import RotaryOps, Rotation


def stores_apart(backend: AttentionBackend, rotary: RotaryOps) -> AttentionBackend | None:
    """Return the backend if it can leave the KV store to `rotary`, which fuses it with the rotation."""
    fuses = rotary.fuses_store and backend.pool.spec.layout == "NHD"
    return backend if fuses and backend.capabilities.fused_kv_store else None


def rotate(
    backend: AttentionBackend,
    rotary: RotaryOps,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: AttentionLayer,
    rotation: Rotation | None,
    slots: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """What comes before attention: q and k, rotated if need be, and whether K and V are stored by then.

    Args:
        backend: of the pool.
        rotary: rotates.
        q: see `Attend`.
        k: likewise.
        v: likewise.
        layer: likewise.
        rotation: likewise.
        slots: where K and V are to be stored with the rotation; None where the backend stores them (see `stores_apart`).
    """
    if rotation is None:
        return q, k, False
    if slots is None:
        return *rotary.rotate(q, k, rotation), False
    pages = backend.pool.k(layer.index), backend.pool.v(layer.index)
    return rotary.rotate_and_store(q, k, v, rotation, *pages, slots, layer.kv_scales), k, True


class BoundAttention:
    """A backend and its plan for a step; see `minisgl_core.contracts.model.Attend`."""

    __slots__ = ("_apart", "_backend", "_plan", "_rotary", "_rotating", "_slots")

    def __init__(self, backend: AttentionBackend, plan: Any, rotary: RotaryOps) -> None:
        self._backend, self._plan, self._rotary = backend, plan, rotary
        self._apart = stores_apart(backend, rotary)
        self._slots = None if self._apart is None else self._apart.kv_slots(plan)
        self._rotating = backend if backend.capabilities.fused_rope_decode else None

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        if rotation is not None and self._rotating is not None and self._rotating.rotates(self._plan, rotation):
            return self._rotating.attend_rotating(q, k, v, layer, rotation, self._plan)
        q, k, is_stored = rotate(self._backend, self._rotary, q, k, v, layer, rotation, self._slots)
        if is_stored and self._apart is not None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            self._apart.attend_stored(q, layer, self._plan, out)
            return out
        return self._backend.forward(q, k, v, layer, self._plan)
