"""Paged attention for Hopper GPUs: decodes in CUDA C++, prefills in Triton."""

from __future__ import annotations

import torch

from minisgl_backends.attention.triton_backend import StepPlan, TritonAttention
from minisgl_backends.cuda import decode
from minisgl_backends.cuda.requirements import hopper_missing
from minisgl_core.contracts.attention import AttentionCapabilities, AttentionLayer, AttentionSpec
from minisgl_core.contracts.kv_cache import KVPages
from minisgl_core.contracts.ops import Rotation


class HopperAttention(TritonAttention):
    """`TritonAttention`, whose decodes fetch keys without a pause, before the kernel in front of them ends, and rotate them."""

    capabilities = AttentionCapabilities(
        fused_kv_store=True, fused_rope_decode=True, cuda_graphs=True, graph_reads_page_table=True
    )

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        """Needs a Hopper GPU, bfloat16, what compiles CUDA C++, and shapes that its copies and products take."""
        if reasons := hopper_missing(spec.device, spec.dtype):
            return reasons
        reasons = super().unsupported(spec)
        group = spec.num_q_heads // spec.num_kv_heads
        if spec.head_dim not in decode.HEAD_DIMS:
            reasons.append(f"it takes heads of {' or '.join(map(str, decode.HEAD_DIMS))}, not of {spec.head_dim}")
        if group > decode.MAX_GROUP:
            reasons.append(f"it takes up to {decode.MAX_GROUP} query heads for each KV head, not {group}")
        if not decode.takes_pages_of(spec.page_size):
            reasons.append(f"it takes pages of 8, 16, 32 or a multiple of 64 tokens, not of {spec.page_size}")
        return reasons

    def __init__(self, spec: AttentionSpec, pool: KVPages, page_table: torch.Tensor) -> None:
        super().__init__(spec, pool, page_table)
        self._own = decode.HopperDecode(pool, spec.num_q_heads)

    def _scratch(self, num_requests: int) -> None:
        """Its kernel has its own. Asked for at the beginning of a step."""
        self._own.begin()

    def rotates(self, plan: StepPlan, rotation: Rotation) -> bool:
        """Steps of decodes alone, whole heads. See `AttentionBackend`."""
        return plan.prefills is None and self._own.rotates(rotation)

    def attend_rotating(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        rotation: Rotation,
        plan: StepPlan,
    ) -> torch.Tensor:
        """See `AttentionBackend`."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        q, k, v = (each if each.stride(-1) == 1 else each.contiguous() for each in (q, k, v))
        self._attend(q, layer, plan, out, decode.Unrotated(k, v, rotation, plan.batch.slots))
        return out

    def _decode(self, q: torch.Tensor, layer: AttentionLayer, plan: StepPlan, out: torch.Tensor) -> None:
        self._attend(q, layer, plan, out)

    def _attend(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        plan: StepPlan,
        out: torch.Tensor,
        unrotated: decode.Unrotated | None = None,
    ) -> None:
        requests = self.page_table, plan.batch.rows, plan.batch.seq_lens
        self._own(q, layer.index, layer.scale, *requests, out, unrotated)
