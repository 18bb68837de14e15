"""Attention of one step, as the model calls it."""

from __future__ import annotations

from typing import Any

import torch

from minisgl_core.contracts.attention import AttentionBackend, AttentionLayer


class BoundAttention:
    """A backend and its plan for a step; see `minisgl_core.contracts.model.Attend`."""

    __slots__ = ("_forward", "_plan")

    def __init__(self, backend: AttentionBackend, plan: Any) -> None:
        self._forward, self._plan = backend.forward, plan

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return self._forward(q, k, v, layer, self._plan)
