"""Attention of one step, as the model calls it."""

from __future__ import annotations

from typing import Any

import torch

from minisgl_core.contracts.attention import AttentionBackend, AttentionLayer
from minisgl_core.contracts.ops import Ops, Rotation


def stores_apart(backend: AttentionBackend, ops: Ops) -> AttentionBackend | None:
    """Return the backend if it can leave the storing of K and V to `ops`, which does it together with the rotation."""
    fuses = ops.fuses_store and backend.pool.spec.layout == "NHD"
    return backend if fuses and backend.capabilities.fused_kv_store else None


def rotate(
    backend: AttentionBackend,
    ops: Ops,
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
        ops: rotates.
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
        return *ops.rotate(q, k, rotation), False
    pages = backend.pool.k(layer.index), backend.pool.v(layer.index)
    return ops.rotate_and_store(q, k, v, rotation, *pages, slots, layer.kv_scales), k, True


class BoundAttention:
    """A backend and its plan for a step; see `minisgl_core.contracts.model.Attend`."""

    __slots__ = ("_apart", "_backend", "_ops", "_plan", "_rotating", "_slots")

    def __init__(self, backend: AttentionBackend, plan: Any, ops: Ops) -> None:
        self._backend, self._plan, self._ops = backend, plan, ops
        self._apart = stores_apart(backend, ops)
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
        q, k, is_stored = rotate(self._backend, self._ops, q, k, v, layer, rotation, self._slots)
        if is_stored and self._apart is not None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            self._apart.attend_stored(q, layer, self._plan, out)
            return out
        return self._backend.forward(q, k, v, layer, self._plan)
