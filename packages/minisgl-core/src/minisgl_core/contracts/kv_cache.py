"""Shapes of the KV cache and access to its pages, for backends and models.

Shape legend: P pages, S tokens per page, Hkv KV heads (local to the rank), D head dimension, T tokens of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

KVLayout = Literal["NHD", "HND"]
"""Order of a page's dimensions: tokens, heads, head dimension (NHD); or heads, tokens, head dimension (HND)."""


@dataclass(frozen=True, slots=True)
class KVPoolSpec:
    """Shape of the KV pool, local to a rank.

    Attributes:
        num_layers: attention layers.
        num_pages: pages, P. Page 0 is the padding page: padding tokens are written there, and no request owns it.
        page_size: tokens per page, S.
        num_kv_heads: KV heads, Hkv.
        head_dim: head dimension, D.
        dtype: dtype of the stored K and V.
        device: device of the pool.
        layout: order of a page's dimensions, one that the attention backend supports.
    """

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    layout: KVLayout = "NHD"

    @property
    def bytes_per_page(self) -> int:
        """Bytes per page, for K and V of all layers."""
        elements = self.num_layers * self.page_size * self.num_kv_heads * self.head_dim
        return 2 * elements * self.dtype.itemsize


class KVPages(Protocol):
    """Interface of the KV pool that attention backends use."""

    @property
    def spec(self) -> KVPoolSpec:
        """Shape of the pool."""

    def k(self, layer: int) -> torch.Tensor:
        """Return the K pages of a layer, [P, S, Hkv, D] or [P, Hkv, S, D]."""

    def v(self, layer: int) -> torch.Tensor:
        """Return the V pages of a layer, shaped like `k`."""

    def kv(self, layer: int) -> torch.Tensor:
        """Return K and V pages of a layer as one tensor, with a leading dimension of 2 before those of `k`."""

    def store_index(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the index for `store` from a step's slots, int64 [T]. It is the same for all layers."""

    def store(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        index: torch.Tensor,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """Write k and v of a layer, [T, Hkv, D] each, at an index from `store_index`. An FP8 pool divides them by `scales`."""
