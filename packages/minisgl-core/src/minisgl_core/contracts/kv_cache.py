"""The KV cache as backends and models see it: groups of layers, and pages of tokens in each.

Shape legend: P pages, S tokens per page, Hkv KV heads (local to the rank), D head dimension, T tokens of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

KVLayout = Literal["NHD", "HND"]
"""Order of a page's dimensions: tokens, heads, head dimension; or heads first."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose K and V have one shape and keep a request's tokens in the same pages.

    Attributes:
        num_layers: layers with attention.
        page_size: S.
        num_kv_heads: Hkv.
        head_dim: D of keys.
        value_head_dim: of values; None for `head_dim`.
        window: latest tokens that are kept, where all layers have that sliding window; None for all tokens.
    """

    num_layers: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int | None = None
    window: int | None = None

    @property
    def elements_per_page(self) -> int:
        """Elements that one page takes, K and V of all layers."""
        return (
            self.num_layers
            * self.page_size
            * self.num_kv_heads
            * (self.head_dim + (self.value_head_dim or self.head_dim))
        )


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """All that a model keeps of a request between steps.

    Attributes:
        groups: of layers; each has pages of its own.
        state_bytes: bytes per request besides pages, such as the state of linear attention.
    """

    groups: tuple[KVGroup, ...]
    state_bytes: int = 0

    @property
    def only_group(self) -> KVGroup:
        """The one group of a cache that keeps nothing else, which is the plain case.

        Raises:
            ValueError: there are several groups, or a state.
        """
        if len(self.groups) != 1 or self.state_bytes:
            raise ValueError(
                f"a KV cache of {len(self.groups)} groups and {self.state_bytes} bytes of state per request"
            )
        return self.groups[0]


@dataclass(frozen=True, slots=True)
class KVPoolSpec:
    """Shape of the pool of one group, local to a rank.

    Attributes:
        num_layers: layers with attention.
        num_pages: P; page 0 is the padding page, written by padded slots and never owned by a request.
        page_size: S, tokens per page.
        num_kv_heads: Hkv.
        head_dim: D.
        dtype: of the stored K and V.
        device: where the pool lies.
        layout: order of a page's dimensions, one of the attention backend's.
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
    ) -> KVPoolSpec:
        """The pool of a group with `num_pages` pages."""
        assert group.value_head_dim in (None, group.head_dim), "values of another size than keys"
        shape = group.page_size, group.num_kv_heads, group.head_dim
        return cls(group.num_layers, num_pages, *shape, dtype, device, layout)

    @property
    def bytes_per_page(self) -> int:
        """Bytes that one page takes, K and V of all layers."""
        group = KVGroup(self.num_layers, self.page_size, self.num_kv_heads, self.head_dim)
        return group.elements_per_page * self.dtype.itemsize


class KVPages(Protocol):
    """K and V of a group's layers in pages, as an attention backend reads and writes them."""

    @property
    def spec(self) -> KVPoolSpec:
        """Shape of the pool."""

    def k(self, layer: int) -> torch.Tensor:
        """K pages of a layer, [P, S, Hkv, D] or [P, Hkv, S, D]."""

    def v(self, layer: int) -> torch.Tensor:
        """V pages of a layer, shaped like `k`."""

    def kv(self, layer: int) -> torch.Tensor:
        """K and V pages of a layer in one tensor, a first dimension of 2 before those of `k`."""

    def store_index(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the index that `store` wants for a step's slots (int64 [T]); the same for all layers."""

    def store(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        index: torch.Tensor,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """Write k and v of a layer, [T, Hkv, D] each, where `store_index` says; an fp8 pool divides them by `scales`."""
