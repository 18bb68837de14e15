"""Paged attention in plain torch: the reference, on any device.

Shape legend: T tokens, B requests of a group, Q and L the most queries and keys of one of them, N pages that hold L tokens,
Hq and Hkv heads, G = Hq / Hkv, D head dimension, S tokens a page.

Requests of similar shape form a group. A group's pages are gathered into padded K and V, one copy a layer, and attended to in
one go; no Python loop runs over requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from minisgl_backends.attention.groups import group_by_size
from minisgl_core.contracts.attention import AttentionBackend, AttentionBatch, AttentionLayer, AttentionSpec
from minisgl_core.kv.pool import KVLayout, KVPool


@dataclass(slots=True)
class _Group:
    """Requests that are computed together.

    Attributes:
        num_queries: Q.
        num_keys: L, a multiple of S.
        tokens: place in the batch of each query, int64 [B * Q], padding repeats a request's last; None where the group is
            the whole batch, unpadded.
        kept: places in ``[0, B * Q)`` that are no padding; None where all are.
        gather: rows of the pool that hold K and then V, int64 [2 * B * Hkv * N].
        positions: of each query, int64 [B, Q, 1].
        masks: what is added to the scores, [B, 1, Q, L], by sliding window.
    """

    num_queries: int
    num_keys: int
    tokens: torch.Tensor | None
    kept: torch.Tensor | None
    gather: torch.Tensor
    positions: torch.Tensor
    masks: dict[int | None, torch.Tensor]


@dataclass(slots=True)
class _Plan:
    store_index: torch.Tensor
    groups: list[_Group]


class TorchAttention(AttentionBackend):
    """Gathers pages, then attends with torch's own kernels."""

    kv_layout: ClassVar[KVLayout] = "HND"

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        """A pool of another dtype."""
        return [] if spec.kv_dtype == spec.dtype else [f"the KV pool must hold {spec.dtype}, not {spec.kv_dtype}"]

    def __init__(self, spec: AttentionSpec, pool: KVPool, page_table: torch.Tensor) -> None:
        super().__init__(spec, pool, page_table)
        num_pages, heads, size = pool.spec.num_pages, spec.num_kv_heads, spec.page_size
        self._rows = [pool.kv(i).view(2 * num_pages * heads, size * spec.head_dim) for i in range(pool.spec.num_layers)]
        # Row of the pool: (K or V, page, head).
        parts = torch.tensor([0, num_pages * heads], device=spec.device)
        self._offsets = (parts[:, None] + torch.arange(heads, device=spec.device)).view(2, 1, heads, 1)

    def plan(self, batch: AttentionBatch) -> _Plan:
        """Group the requests; the gather indices and masks serve all layers."""
        members = group_by_size(batch.q_lens_host, batch.seq_lens_host)
        groups = [self._group(batch, each, len(members) == 1) for each in members]
        return _Plan(self.pool.store_index(batch.slots), groups)

    def _group(self, batch: AttentionBatch, members: np.ndarray, is_all: bool) -> _Group:
        device, size = self.spec.device, self.spec.page_size
        q_lens, seq_lens = batch.q_lens_host[members], batch.seq_lens_host[members]
        num_queries = int(q_lens.max())
        num_pages = -(-int(seq_lens.max()) // size)
        tokens = kept = None
        is_padded = bool((q_lens != num_queries).any())
        if is_padded or not is_all:
            starts = (np.cumsum(batch.q_lens_host) - batch.q_lens_host)[members]
            place = np.minimum(np.arange(num_queries), q_lens[:, None] - 1)
            tokens = torch.from_numpy((starts[:, None] + place).ravel()).to(device)
        if is_padded:
            real = np.arange(num_queries) < q_lens[:, None]
            kept = torch.from_numpy(np.flatnonzero(real)).to(device)
        first = torch.from_numpy((seq_lens - q_lens).astype(np.int64)).to(device)
        rows = batch.rows if is_all else batch.rows[torch.from_numpy(members).to(device)]
        pages = self.page_table[rows, :num_pages].long() * self.spec.num_kv_heads
        return _Group(
            num_queries=num_queries,
            num_keys=num_pages * size,
            tokens=tokens,
            kept=kept,
            gather=(self._offsets + pages[None, :, None]).view(-1),
            positions=first[:, None, None] + torch.arange(num_queries, device=device)[:, None],
            masks={},
        )

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, plan: _Plan
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        self.pool.store(layer.index, k, v, plan.store_index)
        if len(plan.groups) == 1 and plan.groups[0].tokens is None:
            return self._attend(q, layer, plan.groups[0]).reshape(q.shape)
        out = torch.empty_like(q)
        for group in plan.groups:
            assert group.tokens is not None
            found = self._attend(q.index_select(0, group.tokens), layer, group).reshape(-1, *q.shape[1:])
            if group.kept is None:
                out.index_copy_(0, group.tokens, found)
            else:
                out.index_copy_(0, group.tokens[group.kept], found[group.kept])
        return out

    def _attend(self, q: torch.Tensor, layer: AttentionLayer, group: _Group) -> torch.Tensor:
        """q [B * Q, Hq, D] to the same, contiguous."""
        heads, dim = self.spec.num_kv_heads, self.spec.head_dim
        num_requests = len(q) // group.num_queries
        gathered = self._rows[layer.index].index_select(0, group.gather)
        k, v = gathered.view(2, num_requests, heads, group.num_keys, dim).unbind(0)
        mask = self._mask(group, layer.sliding_window)
        if group.num_queries == 1:
            # The G queries of a KV head stand in for G positions, so that K and V are not repeated.
            q = q.view(num_requests, heads, -1, dim)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=layer.scale)
        q = q.view(num_requests, group.num_queries, -1, dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=layer.scale, enable_gqa=True)
        return out.transpose(1, 2).contiguous()

    def _mask(self, group: _Group, window: int | None) -> torch.Tensor:
        mask = group.masks.get(window)
        if mask is None:
            keys = torch.arange(group.num_keys, device=self.spec.device)
            visible = keys <= group.positions
            if window is not None:
                visible &= keys > group.positions - window
            mask = torch.zeros(visible.shape, dtype=self.spec.dtype, device=self.spec.device)
            mask = mask.masked_fill_(~visible, -torch.inf)[:, None]
            group.masks[window] = mask
        return mask
