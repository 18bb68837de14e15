"""Mixture of experts in plain torch, for any device."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from minisgl_core.contracts.moe import ExpertWeights, MoeCapabilities, MoeKernel, MoeSpec
from minisgl_core.utils.fp8 import FP8

Activation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function of gate and up."""

_ACTIVATIONS: dict[str, Activation] = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "swigluoai": lambda gate, up: gate * torch.sigmoid(1.702 * gate) * (up + 1),
}


class TorchMoe(MoeKernel):
    """Sorts the tokens by expert and runs two matmuls per expert that has tokens.

    Matmuls use `x`'s dtype, the weighted sum float32. Quantized weights are dequantized, one expert at a time. On CUDA each call
    synchronizes once, to read the number of tokens per expert, so it cannot be captured in a CUDA graph.
    """

    capabilities = MoeCapabilities(
        activations=tuple(_ACTIVATIONS), biases=True, swiglu_limit=True, weight_dtypes=(FP8,)
    )

    def __init__(self, spec: MoeSpec) -> None:
        super().__init__(spec)
        self._no_bias = (None,) * spec.num_experts
        self._activate = _clamped(_ACTIVATIONS[spec.activation], spec.swiglu_limit)

    def forward(
        self, x: torch.Tensor, weights: ExpertWeights, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """See `MoeKernel.forward`."""
        num_tokens, top_k = topk_ids.shape
        order = topk_ids.flatten().argsort(stable=True)
        num_rows = torch.bincount(topk_ids.flatten(), minlength=self.spec.num_experts).tolist()
        rows = x[order // top_k]
        outputs = torch.empty_like(rows)
        gate_up, gate_up_bias = self._by_expert(weights.gate_up, weights.gate_up_bias, weights.gate_up_scales)
        down, down_bias = self._by_expert(weights.down, weights.down_bias, weights.down_scales)
        start = 0
        for expert, stop in enumerate(itertools.accumulate(num_rows)):
            if stop > start:
                gate, up = F.linear(rows[start:stop], gate_up[expert], gate_up_bias[expert]).chunk(2, dim=-1)
                hidden = self._activate(gate, up)
                outputs[order[start:stop]] = F.linear(hidden, down[expert], down_bias[expert])
            start = stop
        outputs = outputs.view(num_tokens, top_k, -1)
        return torch.einsum("tk,tkh->th", topk_weights, outputs.float()).to(x.dtype)

    def _by_expert(
        self, weight: torch.Tensor, bias: torch.Tensor | None, scales: torch.Tensor | None
    ) -> tuple[torch.Tensor | _Dequantized, torch.Tensor | tuple[None, ...]]:
        """Return weights and biases, both indexed by the expert."""
        matrices = weight if scales is None else _Dequantized(weight, scales, self.spec.dtype)
        return matrices, self._no_bias if bias is None else bias


class _Dequantized:
    """Quantized weights of all experts. Indexing dequantizes one expert's."""

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> None:
        self._codes, self._scales, self._dtype = codes, scales, dtype

    def __getitem__(self, expert: int) -> torch.Tensor:
        return (self._codes[expert].float() * self._scales[expert, :, None]).to(self._dtype)


def _clamped(activation: Activation, limit: float | None) -> Activation:
    if limit is None:
        return activation
    return lambda gate, up: activation(gate.clamp(max=limit), up.clamp(-limit, limit))
