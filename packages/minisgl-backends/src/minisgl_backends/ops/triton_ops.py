"""Fused kernels for GPUs, in Triton."""

import torch

from minisgl_backends.ops.triton_base import TritonProvider, dense
from minisgl_backends.ops.triton_linear import TritonLinear
from minisgl_core.contracts.moe import RoutingSpec
from minisgl_core.contracts.ops import NormOps, Rope, RotaryOps, RoutingOps, SamplingOps, StepOps, VocabShard


class TritonNorm(TritonProvider, NormOps):
    """Norms with the residual add, and the activations, in one launch each."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        from minisgl_backends.kernels import norm

        self._norm = norm

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._norm.rms_norm(x, weight, eps, pdl=self.uses_pdl(len(x)))

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `NormOps.add_rms_norm`; in place."""
        return self._norm.add_rms_norm(x, residual, weight, eps, pdl=self.uses_pdl(len(x)))

    def gelu_tanh_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._activation.gelu_tanh_and_mul(gate_up, pdl=self.uses_pdl(len(gate_up)))
        return out


class TritonRotary(TritonProvider, RotaryOps):
    """Norms of heads, rotary embedding and KV store in one launch."""

    fuses_store = True

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        from minisgl_backends.kernels import rotary

        self._rotary = rotary

    def qk_norm_rope(self, q: torch.Tensor, k: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RotaryOps.qk_norm_rope`; in place."""
        q, k = dense(q), dense(k)
        self._rotary.qk_norm_rope(q, k, rope, pdl=self.uses_pdl(len(q)))
        return q, k

    def qk_norm_rope_kv_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rope: Rope,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        slots: torch.Tensor,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> torch.Tensor:
        """See `RotaryOps.qk_norm_rope_kv_store`; q in place."""
        q, k, v = dense(q), dense(k), dense(v)
        store = v, k_pages, v_pages, slots
        self._rotary.qk_norm_rope(q, k, rope, store, scales, pdl=self.uses_pdl(len(q)))
        return q


class TritonOps(TritonLinear, TritonNorm, TritonRotary, SamplingOps, StepOps, RoutingOps):
    """Kernels of every role. Most operations are one launch."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        from minisgl_backends.kernels import route, sample, step, token_bitmask

        self._route, self._sample, self._step, self._token_bitmask = route, sample, step, token_bitmask

    def decode_inputs(
        self,
        mapped_inputs: torch.Tensor,
        buffer_index: torch.Tensor,
        inputs: torch.Tensor,
        last_tokens: torch.Tensor,
        page_table: torch.Tensor,
        page_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._step.decode_inputs(mapped_inputs, buffer_index, inputs, last_tokens, page_table, page_size)

    def decode_outputs(
        self,
        tokens: torch.Tensor,
        rows: torch.Tensor,
        last_tokens: torch.Tensor,
        mapped_tokens: torch.Tensor,
        buffer_index: torch.Tensor,
    ) -> None:
        self._step.decode_outputs(tokens.contiguous(), rows, last_tokens, mapped_tokens, buffer_index)

    def gather_rows(self, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return self._step.gather_rows(table, index.contiguous())

    def scatter(self, table: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
        self._step.scatter(table, index.contiguous(), values.contiguous())

    def mask_logits(self, logits: torch.Tensor, index: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """See `SamplingOps.mask_logits`; in place."""
        return self._token_bitmask.mask_logits(dense(logits), index, words.contiguous())

    def sample(self, logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        return self._sample.sample(logits, temperature, uniform)

    def sample_shard(
        self, logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor, shard: VocabShard
    ) -> torch.Tensor:
        """See `SamplingOps.sample_shard`: two small all-reduces instead of an all-gather of all logits."""
        return self._sample.sample_shard(logits, temperature, uniform, shard)

    def route(
        self, logits: torch.Tensor, spec: RoutingSpec, correction_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RoutingOps.route`; one launch if the routing is plain softmax and top-k."""
        if correction_bias is not None or not spec.is_plain:
            return super().route(logits, spec, correction_bias)
        return self._route.route(dense(logits), spec.top_k, spec.renormalize)
