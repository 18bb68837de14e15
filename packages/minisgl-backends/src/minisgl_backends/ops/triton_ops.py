"""Fused kernels for GPUs, in Triton."""

from __future__ import annotations

import importlib.util
import os

import torch

from minisgl_core.contracts.ops import LinearOp, Ops, Rotation, VocabShard


class TritonOps(Ops):
    """Norms with the residual add; rotary embedding with the q/k norms and the storing of K and V; activation; routing;
    sampling: one launch each.

    Matrix products of a few rows read weights faster than cuBLAS does; larger ones stay torch's.
    """

    fuses_store = True

    @classmethod
    def unsupported(cls, device: torch.device, dtype: torch.dtype) -> list[str]:
        """Needs Triton, and a GPU or Triton's interpreter."""
        reasons = []
        if importlib.util.find_spec("triton") is None:
            reasons.append("triton is not installed (pip install triton)")
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            reasons.append(f"Triton kernels run on NVIDIA GPUs, not on {device.type}")
        return reasons

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        from minisgl_backends.kernels import (
            activation,
            inputs,
            mask,
            norm,
            quantize,
            rotary,
            route,
            sample,
            skinny_linear,
        )

        self._norm, self._activation, self._rotary, self._mask = norm, activation, rotary, mask
        self._inputs = inputs
        self._route, self._sample, self._skinny, self._quantize = route, sample, skinny_linear, quantize
        self._split_scratch = skinny_linear.SplitScratch(device)

    def overlaps(self, num_rows: int) -> bool:
        """Whether launches over so many rows overlap with their neighbours'; see `minisgl_backends.kernels.dependent_launch`."""
        return False

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        """See `Ops.prepare_linear`."""
        return _of_rows(self._with_skinny(super().prepare_linear(weight, bias), weight, bias, gated=False))

    def prepare_gated(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        """See `Ops.prepare_gated`."""
        return _of_rows(self._with_skinny(super().prepare_gated(weight, bias), weight, bias, gated=True))

    def quantize_rows(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Ops.quantize_rows`."""
        return self._quantize.quantize_rows(_dense(x))

    def prepare_fp8_linear(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        """See `Ops.prepare_fp8_linear`."""
        large = self._fp8_product(weight, scales, bias) if weight.is_cuda else None
        large = large or super().prepare_fp8_linear(weight, scales, bias)
        return _of_rows(self._with_fp8_skinny(large, weight, scales, bias))

    def prepare_fp8_gated(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        """See `Ops.prepare_fp8_gated`."""
        large = super().prepare_fp8_gated(weight, scales, bias)
        return _of_rows(self._with_fp8_skinny(large, weight, scales, bias, gated=True))

    def _fp8_product(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        """By torch's own kernels."""
        right, right_scales, quantize_rows = weight.t(), scales[None], self._quantize.quantize_rows

        def product(x: torch.Tensor) -> torch.Tensor:
            codes, row_scales = quantize_rows(x)
            out: torch.Tensor = torch._scaled_mm(
                codes, right, row_scales, right_scales, out_dtype=x.dtype, use_fast_accum=True
            )
            return out if bias is None else out.add_(bias)  # apart: with some shapes cuBLAS takes none

        return product

    def _with_fp8_skinny(
        self,
        large: LinearOp,
        weight: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        gated: bool = False,
    ) -> LinearOp:
        if self.dtype != torch.bfloat16 or not self._skinny.fits(weight):
            return large
        skinny = self._skinny.SkinnyLinear(weight, bias, self._split_scratch, gated=gated, scales=scales)
        max_rows, quantize_rows = self._skinny.MAX_ROWS, self._quantize.quantize_rows
        return lambda x: skinny(*quantize_rows(x)) if len(x) <= max_rows else large(x)

    def _with_skinny(
        self, large: LinearOp, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool
    ) -> LinearOp:
        if not self._skinny.fits(weight):
            return large
        skinny = self._skinny.SkinnyLinear(weight, bias, self._split_scratch, gated=gated)
        max_rows = self._skinny.MAX_ROWS
        return lambda x: skinny(x) if len(x) <= max_rows else large(x)

    def decode_inputs(
        self,
        shared: torch.Tensor,
        turn: torch.Tensor,
        inputs: torch.Tensor,
        last_tokens: torch.Tensor,
        page_table: torch.Tensor,
        page_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Ops.decode_inputs`."""
        return self._inputs.decode_inputs(shared, turn, inputs, last_tokens, page_table, page_size)

    def decode_outputs(
        self,
        tokens: torch.Tensor,
        rows: torch.Tensor,
        last_tokens: torch.Tensor,
        shared: torch.Tensor,
        turn: torch.Tensor,
    ) -> None:
        """See `Ops.decode_outputs`."""
        self._inputs.decode_outputs(tokens.contiguous(), rows, last_tokens, shared, turn)

    def take_rows(self, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """See `Ops.take_rows`."""
        return self._inputs.take_rows(table, index.contiguous())

    def put(self, table: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
        """See `Ops.put`."""
        self._inputs.put(table, index.contiguous(), values.contiguous())

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Ops.rms_norm`."""
        return self._norm.rms_norm(x, weight, eps, overlap=self.overlaps(len(x)))

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Ops.add_rms_norm`; in place."""
        return self._norm.add_rms_norm(x, residual, weight, eps, overlap=self.overlaps(len(x)))

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Ops.silu_and_mul`."""
        return self._activation.silu_and_mul(gate_up, overlap=self.overlaps(len(gate_up)))

    def rotate(self, q: torch.Tensor, k: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Ops.rotate`; in place."""
        q, k = _dense(q), _dense(k)
        self._rotary.rotate(q, k, rotation, overlap=self.overlaps(len(q)))
        return q, k

    def rotate_and_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotation: Rotation,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        slots: torch.Tensor,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> torch.Tensor:
        """See `Ops.rotate_and_store`; q in place."""
        q, k, v = _dense(q), _dense(k), _dense(v)
        store = v, k_pages, v_pages, slots
        self._rotary.rotate(q, k, rotation, store, scales, overlap=self.overlaps(len(q)))
        return q

    def mask_logits(self, logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """See `Ops.mask_logits`; in place."""
        return self._mask.mask_logits(_dense(logits), rows, words.contiguous())

    def sample(self, logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        """See `Ops.sample`."""
        return self._sample.sample(logits, temperature, uniform)

    def sample_shard(
        self, logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor, shard: VocabShard
    ) -> torch.Tensor:
        """See `Ops.sample_shard`: two short sums instead of all logits on every rank."""
        return self._sample.sample_shard(logits, temperature, uniform, shard)

    def route(self, logits: torch.Tensor, top_k: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Ops.route`."""
        return self._route.route(_dense(logits), top_k, normalize)


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Itself where its last dimension is contiguous, as kernels expect it; the others may have any stride."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _of_rows(product: LinearOp) -> LinearOp:
    """Have a product of [M, in] take [..., in]."""

    def of_rows(x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 2 and x.stride(1) == 1:
            return product(x)
        out = product(_dense(x.reshape(-1, x.shape[-1])))
        return out.reshape(*x.shape[:-1], out.shape[-1])

    return of_rows
