"""K and V of every layer, in pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVPoolSpec:
    """Shape of a pool, local to a rank.

    Attributes:
        num_layers: layers with attention.
        num_pages: P; page 0 is the padding page, written by padded slots and never owned by a request.
        page_size: S, tokens a page.
        num_kv_heads: Hkv.
        head_dim: D.
        dtype: of the stored K and V.
        device: where the pool lies.
    """

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_page(self) -> int:
        """Bytes that one page takes, K and V of all layers."""
        return 2 * self.num_layers * self.page_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVPool:
    """One tensor ``[2, num_layers, P, S, Hkv, D]``; K first, then V."""

    def __init__(self, spec: KVPoolSpec) -> None:
        self.spec = spec
        shape = (2, spec.num_layers, spec.num_pages, spec.page_size, spec.num_kv_heads, spec.head_dim)
        self.data = torch.zeros(shape, dtype=spec.dtype, device=spec.device)
        self._k = list(self.data[0].unbind(0))
        self._v = list(self.data[1].unbind(0))
        slots = spec.num_pages * spec.page_size
        self._k_slots = [k.view(slots, spec.num_kv_heads, spec.head_dim) for k in self._k]
        self._v_slots = [v.view(slots, spec.num_kv_heads, spec.head_dim) for v in self._v]

    def k(self, layer: int) -> torch.Tensor:
        """K pages of a layer, [P, S, Hkv, D]."""
        return self._k[layer]

    def v(self, layer: int) -> torch.Tensor:
        """V pages of a layer, [P, S, Hkv, D]."""
        return self._v[layer]

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Write k and v ([T, Hkv, D]) at `slots` (int64 [T]) of a layer."""
        self._k_slots[layer].index_copy_(0, slots, k)
        self._v_slots[layer].index_copy_(0, slots, v)
