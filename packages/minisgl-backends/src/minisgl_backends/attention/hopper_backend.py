"""Paged attention for Hopper GPUs, in CUDA C++."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from minisgl_backends.attention.triton_backend import StepPlan, TritonAttention
from minisgl_backends.cuda import decode, prefill
from minisgl_backends.cuda.driver import mappable
from minisgl_backends.cuda.requirements import hopper_missing
from minisgl_core.contracts.attention import AttentionBatch, AttentionLayer, AttentionSpec
from minisgl_core.contracts.kv_cache import KVPages
from minisgl_core.contracts.ops import Rope
from minisgl_core.utils.fp8 import FP8

if TYPE_CHECKING:
    from minisgl_backends.kernels.paged_decode import SplitKVWorkspace


class HopperAttention(TritonAttention):
    """Kernels for Hopper: decode prefetches keys (PDL) and fuses RoPE and KV store, prefill is like FlashAttention-3.

    Decodes of models with sliding windows, soft caps or sinks use Triton's kernel. So do those with more than `decode.MAX_GROUP`
    query heads per KV head, or with an FP8 pool and heads of 64.
    """

    head_dims = decode.HEAD_DIMS
    capabilities = replace(TritonAttention.capabilities, fused_rope_decode=True)

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        """Name a missing Hopper GPU or NVRTC, and an unsupported dtype, head dimension, group or page size."""
        if reasons := hopper_missing(spec.device, spec.dtype):
            return reasons
        reasons = super().unsupported(spec)
        group = spec.num_q_heads // spec.num_kv_heads
        if group > prefill.MAX_GROUP:
            reasons.append(f"it supports up to {prefill.MAX_GROUP} query heads per KV head, not {group}")
        if not decode.supports_page_size(spec.page_size):
            reasons.append(
                f"it supports pages of 8, 16, 32 or a multiple of 64 tokens, not of {spec.page_size} (--page-size 64)"
            )
        return reasons

    def __init__(self, spec: AttentionSpec, pool: KVPages, page_table: torch.Tensor) -> None:
        super().__init__(spec, pool, page_table)
        is_wide = spec.num_q_heads > decode.MAX_GROUP * spec.num_kv_heads
        needs_triton = prefill.has_extras(spec) or is_wide or (spec.kv_dtype == FP8 and spec.head_dim != 128)
        self._hopper_decode = None if needs_triton else decode.HopperDecode(pool, spec.num_q_heads)
        self._hopper_prefill = prefill.HopperPrefill(spec, pool)
        self._num_pairs = self._hopper_prefill.num_pairs

    def _begin_decodes(self, num_requests: int) -> "SplitKVWorkspace | None":
        """Start a step of `HopperDecode`, which has a workspace of its own, or of Triton's kernel."""
        if self._hopper_decode is None:
            return super()._begin_decodes(num_requests)
        self._hopper_decode.begin_step()
        return None

    def supports_fused_rope(self, plan: StepPlan, rope: Rope) -> bool:
        """Return True in steps without prefills, for RoPE over whole heads. See `AttentionBackend.supports_fused_rope`."""
        if self._hopper_decode is None or plan.prefills is not None:
            return False
        return self._hopper_decode.supports_fused_rope(rope)

    def attend_fused_rope(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        rope: Rope,
        plan: StepPlan,
    ) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        self._decode(q, layer, plan, out, decode.RopeAndStore(k, v, rope, plan.batch.slots))
        return out

    def _decode(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        plan: StepPlan,
        out: torch.Tensor,
        rope_and_store: decode.RopeAndStore | None = None,
    ) -> None:
        if self._hopper_decode is None:
            super()._decode(q, layer, plan, out)
        else:
            metadata = self.page_table, plan.batch.rows, plan.batch.seq_lens
            self._hopper_decode(q, layer.index, layer.scale, *metadata, out, rope_and_store, layer.kv_scales)

    def _prefill(
        self, q: torch.Tensor, layer: AttentionLayer, prefills: AttentionBatch, tiles: torch.Tensor, out: torch.Tensor
    ) -> None:
        self._hopper_prefill(mappable(q), layer, self.page_table, prefills, tiles, out)
