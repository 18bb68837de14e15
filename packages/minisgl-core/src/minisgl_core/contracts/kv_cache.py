"""Shapes of the KV cache and access to its pages, for backends and models.

Shape legend: P pages, S tokens per page, Hkv KV heads (local to the rank), D head dimension, T tokens of the batch.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

KVLayout = Literal["NHD", "HND"]
"""Order of a page's dimensions: tokens, heads, head dimension (NHD); or heads, tokens, head dimension (HND)."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Group of layers whose K and V have one shape and use the same pages per request.

    Attributes:
        num_layers: attention layers.
        page_size: tokens per page, S.
        num_kv_heads: KV heads, Hkv.
        head_dim: head dimension of keys, D.
        value_head_dim: head dimension of values; None for `head_dim`.
        window: sliding window of all its layers, so that older tokens need not be kept; None to keep all tokens.
    """

    num_layers: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int | None = None
    window: int | None = None

    @property
    def elements_per_page(self) -> int:
        """Elements per page, for K and V of all layers."""
        dims = self.head_dim + (self.value_head_dim or self.head_dim)
        return self.num_layers * self.page_size * self.num_kv_heads * dims


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """State that a model keeps per request between steps. Reserved: the engine supports one group and no further state.

    Attributes:
        groups: groups of layers, each with its own pages.
        state_bytes: bytes per request besides pages, such as the state of linear attention.
    """

    groups: tuple[KVGroup, ...]
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class KVPoolSpec:
    """Shape of one group's pool, local to a rank.

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

    @classmethod
    def of_group(
        cls, group: KVGroup, num_pages: int, dtype: torch.dtype, device: torch.device, layout: KVLayout
    ) -> "KVPoolSpec":
        """Return the spec of a group's pool with `num_pages` pages."""
        assert group.value_head_dim in (None, group.head_dim), "values of another size than keys"
        shape = group.page_size, group.num_kv_heads, group.head_dim
        return cls(group.num_layers, num_pages, *shape, dtype, device, layout)

    @property
    def bytes_per_page(self) -> int:
        """Bytes per page, for K and V of all layers."""
        group = KVGroup(self.num_layers, self.page_size, self.num_kv_heads, self.head_dim)
        return group.elements_per_page * self.dtype.itemsize


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
