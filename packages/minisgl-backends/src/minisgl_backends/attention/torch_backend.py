"""Paged attention in plain torch: the reference, on any device.

Shape legend: T tokens, B requests of a group, Hq and Hkv heads, G = Hq / Hkv, D head dimension, S tokens per page.
Q and L are the largest numbers of queries and keys of a request in the group. N pages hold L tokens. A block has C queries.

Requests of similar shape form a group. A group's pages are gathered into padded K and V, with one copy of each per layer.
Attention runs over blocks of queries, and no Python loop runs over requests. The G query heads of a KV head are rows of one
GEMM, so that K and V are never repeated.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from minisgl_backends.attention.groups import group_by_size
from minisgl_core.contracts.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionCapabilities,
    AttentionLayer,
    AttentionSpec,
)
from minisgl_core.contracts.kv_cache import KVPages
from minisgl_core.utils.fp8 import FP8

_BLOCK = 128
"""Queries per block. A block reads no key past its last query, which halves the work of a long prefill."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Queries ``[start, stop)`` of a group.

    Attributes:
        num_keys: number of keys that the block reads, from the first: at least all that are visible to any of its queries.
        masked_from: keys before this one are visible to all queries.
        mask: added to the scores of the keys from `masked_from` on, [B, 1, 1, C, num_keys - masked_from]. For single queries
            it is repeated for all heads, [B, Hkv, G, 1, num_keys]. None if nothing is masked.
    """

    start: int
    stop: int
    num_keys: int
    masked_from: int
    mask: torch.Tensor | None


@dataclass(slots=True)
class GatheredGroup:
    """Requests that are computed as one padded tensor.

    Attributes:
        num_requests: B.
        num_queries: Q.
        num_keys: L, a multiple of S.
        tokens: index of each query in the batch, int64 [B * Q]; padding repeats a request's last query. None if the group is
            the whole batch without padding.
        kept: indices in ``[0, B * Q)`` that are not padding; None if none is padding.
        gather: rows of the pool that hold K and then V, int64 [2 * B * Hkv * N].
        past: indices in ``[0, B * Hkv * L)`` of gathered keys past their request's end, int64; None if there are none. These
            slots hold data of other requests, or stale data, which may be NaN.
        first_positions: position of each request's first query, int64 [B], on the CPU.
        last_positions: position of its last query, likewise.
        blocks: query blocks by sliding window, shared by all layers.
    """

    num_requests: int
    num_queries: int
    num_keys: int
    tokens: torch.Tensor | None
    kept: torch.Tensor | None
    gather: torch.Tensor
    past: torch.Tensor | None
    first_positions: np.ndarray
    last_positions: np.ndarray
    blocks: dict[int | None, list[_Block]]


@dataclass(slots=True)
class _Plan:
    """Plan of a step: `KVPages.store_index` of its slots, and the padded groups of its requests."""

    store_index: torch.Tensor
    groups: list[GatheredGroup]


class TorchAttention(AttentionBackend):
    """Attention by torch's own kernels over gathered pages.

    K and V of an fp8 pool are dequantized when they are gathered. In bfloat16, scores and weights are rounded to bfloat16, as
    in transformers' eager attention.
    """

    capabilities = AttentionCapabilities(
        layouts=("HND",), fp8_kv=True, sliding_windows=True, soft_cap=True, sinks=True, multi_token_decodes=True
    )

    def __init__(self, spec: AttentionSpec, pool: KVPages, page_table: torch.Tensor) -> None:
        super().__init__(spec, pool, page_table)
        num_pages, heads, size = pool.spec.num_pages, spec.num_kv_heads, spec.page_size
        rows = [pool.kv(i).view(2 * num_pages * heads, size * spec.head_dim) for i in range(pool.spec.num_layers)]
        self._rows = [layer.view(torch.uint8) for layer in rows] if spec.kv_dtype == FP8 else rows
        # A row of the pool is (K or V, page, head).
        kv_offsets = torch.tensor([0, num_pages * heads], device=spec.device)
        self._offsets = (kv_offsets[:, None] + torch.arange(heads, device=spec.device)).view(2, 1, heads, 1)

    def plan(self, batch: AttentionBatch) -> _Plan:
        """Group the requests. All layers share the gather indices and masks."""
        return _Plan(self.pool.store_index(batch.slots), self.groups(batch))

    def groups(self, batch: AttentionBatch) -> list[GatheredGroup]:
        """Group requests of similar shape, and compute each group's gather indices."""
        groups = group_by_size(batch.q_lens_host, batch.seq_lens_host)
        return [self._group(batch, members, len(groups) == 1) for members in groups]

    def _group(self, batch: AttentionBatch, members: np.ndarray, is_all: bool) -> GatheredGroup:
        device, size = self.spec.device, self.spec.page_size
        q_lens, seq_lens = batch.q_lens_host[members], batch.seq_lens_host[members]
        num_queries = int(q_lens.max())
        num_pages = -(-int(seq_lens.max()) // size)
        tokens = kept = None
        is_padded = bool((q_lens != num_queries).any())
        if is_padded or not is_all:
            starts = (np.cumsum(batch.q_lens_host) - batch.q_lens_host)[members]
            offsets = np.minimum(np.arange(num_queries), q_lens[:, None] - 1)
            tokens = torch.from_numpy((starts[:, None] + offsets).ravel()).to(device)
        if is_padded:
            is_kept = np.arange(num_queries) < q_lens[:, None]
            kept = torch.from_numpy(np.flatnonzero(is_kept)).to(device)
        rows = batch.rows if is_all else batch.rows[torch.from_numpy(members).to(device)]
        pages = self.page_table[rows, :num_pages].long() * self.spec.num_kv_heads
        is_past = np.arange(num_pages * size) >= seq_lens[:, None]
        past = np.flatnonzero(np.repeat(is_past, self.spec.num_kv_heads, axis=0))
        return GatheredGroup(
            num_requests=len(members),
            num_queries=num_queries,
            num_keys=num_pages * size,
            tokens=tokens,
            kept=kept,
            gather=(self._offsets + pages[None, :, None]).view(-1),
            past=torch.from_numpy(past).to(device) if len(past) else None,
            first_positions=(seq_lens - q_lens).astype(np.int64),
            last_positions=seq_lens.astype(np.int64) - 1,
            blocks={},
        )

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, plan: _Plan
    ) -> torch.Tensor:
        self.pool.store(layer.index, k, v, plan.store_index, layer.kv_scales)
        return self.attend_groups(q, layer, plan.groups)

    def attend_groups(self, q: torch.Tensor, layer: AttentionLayer, groups: list[GatheredGroup]) -> torch.Tensor:
        """Attend to stored K and V; q [T, Hq, D] of the groups' requests to the same shape."""
        if len(groups) == 1 and groups[0].tokens is None:
            return self.attend_group(q, layer, groups[0]).reshape(q.shape)
        out = torch.empty_like(q)
        for group in groups:
            assert group.tokens is not None
            group_out = self.attend_group(q.index_select(0, group.tokens), layer, group).reshape(-1, *q.shape[1:])
            if group.kept is None:
                out.index_copy_(0, group.tokens, group_out)
            else:
                out.index_copy_(0, group.tokens[group.kept], group_out[group.kept])
        return out

    def attend_group(self, q: torch.Tensor, layer: AttentionLayer, group: GatheredGroup) -> torch.Tensor:
        """Attend in one group; q [B * Q, Hq, D] to the same shape."""
        heads, dim, num = self.spec.num_kv_heads, self.spec.head_dim, group.num_requests
        pool, window, num_visible = self._rows[layer.index], layer.sliding_window, int(group.first_positions[0]) + 1
        is_plain = layer.soft_cap is None and layer.sinks is None and (window is None or num_visible <= window)
        if is_plain and num == group.num_queries == 1:
            kv = self._gather(pool, group.gather, layer.kv_scales)
            k, v = kv.view(2, 1, heads, -1, dim)[:, :, :, :num_visible].unbind(0)
            return F.scaled_dot_product_attention(q.view(1, heads, -1, dim), k, v, scale=layer.scale).view(q.shape)
        blocks = group.blocks.get(window)
        if blocks is None:
            blocks = group.blocks[window] = self._blocks(group, window)
        q = (q * layer.scale).view(num, group.num_queries, heads, -1, dim)
        k_rows, v_rows = group.gather.chunk(2)
        k = self._zero_past_end(self._gather(pool, k_rows, layer.kv_scales[:1]), group).transpose(1, 2)
        weights = self._weights(q, k, blocks[0], layer)
        # V is gathered after the first use of K, which it would evict from the processor's cache.
        v = self._zero_past_end(self._gather(pool, v_rows, layer.kv_scales[1:]), group)
        outs = [self._weighted_values(weights, v, num)]
        outs += [self._weighted_values(self._weights(q, k, block, layer), v, num) for block in blocks[1:]]
        out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
        return out.reshape(-1, self.spec.num_q_heads, dim)

    def _zero_past_end(self, gathered: torch.Tensor, group: GatheredGroup) -> torch.Tensor:
        """Return K or V of a group as [B * Hkv, L, D], with zeros past each request's end, since 0 * NaN is NaN."""
        if group.past is not None:
            gathered.view(-1, self.spec.head_dim).index_fill_(0, group.past, 0)
        return gathered.view(group.num_requests * self.spec.num_kv_heads, -1, self.spec.head_dim)

    def _gather(self, rows: torch.Tensor, index: torch.Tensor, scales: tuple[float, ...]) -> torch.Tensor:
        """Gather rows of the pool, and dequantize those of an fp8 pool to the model's dtype.

        Two scales apply to the two halves of the rows, one scale to all rows.
        """
        gathered = rows.index_select(0, index)
        if self.spec.kv_dtype != FP8:
            return gathered
        wide = gathered.view(FP8).float()
        for part, scale in zip(wide.chunk(len(scales)), scales, strict=True):
            part.mul_(scale)
        return wide.to(self.spec.dtype)

    @staticmethod
    def _weights(q: torch.Tensor, k: torch.Tensor, block: _Block, layer: AttentionLayer) -> torch.Tensor:
        """Return softmax weights [B * Hkv, G * C, num_keys] from q [B, Q, Hkv, G, D] and k [B * Hkv, D, L]."""
        soft_cap, sinks = layer.soft_cap, layer.sinks
        rows = q[:, block.start : block.stop].permute(0, 2, 3, 1, 4)
        scores = torch.bmm(rows.reshape(len(k), -1, q.shape[-1]), k[:, :, : block.num_keys])
        if soft_cap is not None:
            scores = scores.float().div_(soft_cap).tanh_().mul_(soft_cap).to(scores.dtype)
        if block.mask is not None:
            scores.view(*rows.shape[:-1], -1)[..., block.masked_from :].add_(block.mask)
        if sinks is None:
            return torch.softmax(scores, dim=-1)
        column = sinks.to(scores.dtype).view(*rows.shape[1:3], 1).expand(*rows.shape[:-1]).reshape(len(k), -1, 1)
        return torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]

    def _weighted_values(self, weights: torch.Tensor, v: torch.Tensor, num: int) -> torch.Tensor:
        """Return ``weights @ v`` as [B, C, Hkv, G, D] from weights [B * Hkv, G * C, num_keys] and v [B * Hkv, L, D].

        The weights are those of the first keys; `num` is B.
        """
        out = torch.bmm(weights, v[:, : weights.shape[-1]])
        heads = self.spec.num_kv_heads
        return out.view(num, heads, self.spec.num_q_heads // heads, -1, v.shape[-1]).permute(0, 3, 1, 2, 4)

    def _blocks(self, group: GatheredGroup, window: int | None) -> list[_Block]:
        """Split the queries into blocks, and build each block's causal and sliding-window mask."""
        heads = self.spec.num_kv_heads
        lowest, highest = int(group.first_positions.min()), int(group.first_positions.max())
        first, last = (
            torch.from_numpy(x).to(self.spec.device)[:, None, None]
            for x in (group.first_positions, group.last_positions)
        )
        blocks = []
        for start in range(0, group.num_queries, _BLOCK):
            stop = min(start + _BLOCK, group.num_queries)
            # A slice of the keys is less work, but is copied for the GEMM. With one block, the copy costs more than it saves.
            num_keys = group.num_keys if group.num_queries <= _BLOCK else min(highest + stop, group.num_keys)
            masked_from = 0 if window is not None else min(lowest + start + 1, num_keys)
            mask = None
            if masked_from < num_keys:
                if group.num_queries == 1:  # one contiguous addition is faster than a shorter strided one
                    masked_from = 0
                keys = torch.arange(masked_from, num_keys, device=self.spec.device)
                # Padding repeats the last query. Without visible keys, it would give NaN, which some GEMMs spread to other rows.
                positions = torch.minimum(first + torch.arange(start, stop, device=self.spec.device)[:, None], last)
                is_masked = keys > positions
                if window is not None:
                    is_masked |= keys <= positions - window
                mask = torch.zeros(is_masked.shape, dtype=self.spec.dtype, device=self.spec.device)
                mask = mask.masked_fill_(is_masked, -torch.inf)[:, None, None]
                if group.num_queries == 1:
                    mask = mask.expand(-1, heads, self.spec.num_q_heads // heads, -1, -1).contiguous()
            blocks.append(_Block(start, stop, num_keys, masked_from, mask))
        return blocks
