"""One shape of K and V for layers whose heads differ, since the KV pool has one shape for all layers.

Zeros are appended to shorter heads, and KV heads are repeated, which changes no score and no output.
"""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch.nn.functional import pad

from minisgl_core.errors import ModelFormatError
from minisgl_models.transformers_backend.trace import AttentionCall


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of all layers in the KV pool and in calls of the attention backend, in a model that is not sharded.

    Attributes:
        num_q_heads: Hq.
        num_kv_heads: Hkv.
        head_dim: D of q, k and v.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, calls: tuple[AttentionCall, ...]) -> Self:
        """Return the smallest shape that the calls of all layers fit into.

        Raises:
            ModelFormatError: repeated KV heads would not divide the query heads of a layer.
        """
        num_kv_heads = math.lcm(*(call.num_kv_heads for call in calls))
        group = max(call.num_q_heads // num_kv_heads for call in calls)
        for call in calls:
            if call.num_q_heads % num_kv_heads or (call.sinks and call.num_q_heads != group * num_kv_heads):
                heads = sorted({(each.num_q_heads, each.num_kv_heads) for each in calls})
                raise ModelFormatError(
                    f"its layers have different heads {heads} (query heads, KV heads) that fit no KV pool"
                )
        head_dim = max(max(call.head_dim, call.value_head_dim) for call in calls)
        return cls(group * num_kv_heads, num_kv_heads, head_dim)

    def sharded(self, tp_size: int) -> Self:
        """Return the heads of one rank."""
        return type(self)(self.num_q_heads // tp_size, self.num_kv_heads // tp_size, self.head_dim)

    def fit(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q [T, h, d], k [T, g, d] and v [T, g, e] as contiguous tensors of this shape."""
        kv_shape = self.num_kv_heads, self.head_dim
        if q.shape[1:] == (self.num_q_heads, self.head_dim) and k.shape[1:] == v.shape[1:] == kv_shape:
            return q.contiguous(), k.contiguous(), v.contiguous()
        k, v = (each.repeat_interleave(self.num_kv_heads // each.shape[1], dim=1) for each in (k, v))
        k, v = (pad(each, (0, self.head_dim - each.shape[2])) for each in (k, v))
        group = q.shape[1] // self.num_kv_heads
        missing = self.num_q_heads // self.num_kv_heads - group
        q = q.reshape(len(q), self.num_kv_heads, group, q.shape[2])
        q = pad(q, (0, self.head_dim - q.shape[3], 0, missing)).flatten(1, 2)
        return q.contiguous(), k.contiguous(), v.contiguous()

    def crop(self, out: torch.Tensor, num_q_heads: int, value_head_dim: int) -> torch.Tensor:
        """Return the part of an output [T, Hq, D] that belongs to the layer: [T, num_q_heads, value_head_dim]."""
        groups = out.reshape(len(out), self.num_kv_heads, self.num_q_heads // self.num_kv_heads, self.head_dim)
        return groups[:, :, : num_q_heads // self.num_kv_heads, :value_head_dim].flatten(1, 2)
