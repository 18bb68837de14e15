"""Attention of one step, as the model calls it."""

from __future__ import annotations

from typing import Any

import torch

from minisgl_core.contracts.attention import AttentionBackend, AttentionLayer, StoresApart
from minisgl_core.contracts.ops import Ops, Rotation


def stores_apart(backend: AttentionBackend, ops: Ops) -> StoresApart | None:
    """The backend, where it can leave the storing of K and V to others and `ops` does it together with the rotation."""
    fuses = ops.fuses_store and backend.pool.spec.layout == "NHD"
    return backend if fuses and isinstance(backend, StoresApart) else None


class BoundAttention:
    """A backend and its plan for a step; see `minisgl_core.contracts.model.Attend`."""

    __slots__ = ("_apart", "_backend", "_ops", "_plan")

    def __init__(self, backend: AttentionBackend, plan: Any, ops: Ops) -> None:
        self._backend, self._plan, self._ops = backend, plan, ops
        self._apart = stores_apart(backend, ops)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        if rotation is not None:
            if self._apart is not None:
                pages = self._backend.pool.k(layer.index), self._backend.pool.v(layer.index)
                slots = self._apart.kv_slots(self._plan)
                q = self._ops.rotate_and_store(q, k, v, rotation, *pages, slots, layer.kv_scales)
                return self._apart.attend_stored(q, layer, self._plan)
            q, k = self._ops.rotate(q, k, rotation)
        return self._backend.forward(q, k, v, layer, self._plan)
