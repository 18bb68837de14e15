"""Attention backend in plain PyTorch, one request after the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl_core.contracts.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionCapabilities,
    AttentionLayer,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Index tensors of a step.

    Attributes:
        store_index: destination of the new K and V in the pool; see `KVPages.store_index`.
        requests: range of the queries of each request in q, and the slots of its keys, int64 [N].
    """

    store_index: torch.Tensor
    requests: list[tuple[slice, torch.Tensor]]


class ExampleAttention(AttentionBackend):
    """Gathers the keys and values of each request from the pool, and attends in float32. Runs on any device."""

    capabilities = AttentionCapabilities(sliding_windows=True)

    def plan(self, batch: AttentionBatch) -> Plan:
        """Translate each request's row of the page table into slots of the pool."""
        page_size = self.spec.page_size
        offsets = torch.arange(page_size, device=self.spec.device)
        requests, start = [], 0
        for row, q_len, seq_len in zip(batch.rows.tolist(), batch.q_lens_host, batch.seq_lens_host, strict=True):
            pages = self.page_table[row, : -(-int(seq_len) // page_size)]
            key_slots = (pages[:, None] * page_size + offsets).flatten()[: int(seq_len)]
            requests.append((slice(start, start + int(q_len)), key_slots))
            start += int(q_len)
        return Plan(self.pool.store_index(batch.slots), requests)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, plan: Plan
    ) -> torch.Tensor:
        """Store k and v, then attend request by request."""
        self.pool.store(layer.index, k, v, plan.store_index)
        all_k, all_v = self.pool.k(layer.index).flatten(0, 1), self.pool.v(layer.index).flatten(0, 1)
        group = self.spec.num_q_heads // self.spec.num_kv_heads
        out = torch.empty_like(q)
        for queries, key_slots in plan.requests:
            keys = all_k[key_slots].float().repeat_interleave(group, dim=1)  # [N, Hq, D]
            values = all_v[key_slots].float().repeat_interleave(group, dim=1)
            scores = torch.einsum("qhd,nhd->hqn", q[queries].float(), keys) * layer.scale
            num_keys, num_queries = len(key_slots), queries.stop - queries.start
            key_at = torch.arange(num_keys, device=q.device)
            query_at = torch.arange(num_keys - num_queries, num_keys, device=q.device)[:, None]
            hidden = key_at > query_at
            if layer.sliding_window is not None:
                hidden |= key_at <= query_at - layer.sliding_window
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[queries] = torch.einsum("hqn,nhd->qhd", weights, values)
        return out
