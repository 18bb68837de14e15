"""Paged attention for Hopper GPUs: decodes in CUDA C++, prefills in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minisgl_backends.attention.triton_backend import TritonAttention
from minisgl_backends.cuda import decode
from minisgl_backends.cuda.requirements import hopper_missing
from minisgl_core.contracts.attention import AttentionBatch, AttentionLayer, AttentionSpec
from minisgl_core.kv.pool import KVPool

if TYPE_CHECKING:
    from minisgl_backends.kernels.paged_decode import DecodeScratch


class HopperAttention(TritonAttention):
    """`TritonAttention`, whose decodes fetch keys without a pause, and before the kernel in front of them ends."""

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        """Needs a Hopper GPU, bfloat16, what compiles CUDA C++, and shapes that its copies and products take."""
        if reasons := hopper_missing(spec.device, spec.dtype):
            return reasons
        reasons = super().unsupported(spec)
        group = spec.num_q_heads // spec.num_kv_heads
        if spec.sliding_windows:
            reasons.append("it has no sliding windows (--attn triton has)")
        if spec.kv_dtype != spec.dtype:
            reasons.append(f"it reads K and V in bfloat16, not in {str(spec.kv_dtype).removeprefix('torch.')}")
        if spec.head_dim not in decode.HEAD_DIMS:
            reasons.append(f"it takes heads of {' or '.join(map(str, decode.HEAD_DIMS))}, not of {spec.head_dim}")
        if group > decode.MAX_GROUP:
            reasons.append(f"it takes up to {decode.MAX_GROUP} query heads for each KV head, not {group}")
        if not decode.takes_pages_of(spec.page_size):
            reasons.append(f"it takes pages of 8, 16, 32 or a multiple of 64 tokens, not of {spec.page_size}")
        return reasons

    def __init__(self, spec: AttentionSpec, pool: KVPool, page_table: torch.Tensor) -> None:
        super().__init__(spec, pool, page_table)
        self._own = decode.HopperDecode(pool, spec.num_q_heads)
        self._num_programs = torch.cuda.get_device_properties(spec.device).multi_processor_count * decode.BLOCKS

    def _decode(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        batch: AttentionBatch,
        scratch: DecodeScratch,
        out: torch.Tensor,
    ) -> None:
        requests = self.page_table, batch.rows, batch.seq_lens
        self._own(q, layer.index, layer.scale, *requests, out, scratch)
