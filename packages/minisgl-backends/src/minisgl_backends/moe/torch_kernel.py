"""Mixture of experts in plain torch, for any device."""

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from minisgl_backends.moe.packed_weights import dequantize
from minisgl_core.contracts.moe import MXFP4, UINT4, ExpertWeights, MoeCapabilities, MoeKernel, MoeSpec
from minisgl_core.utils.fp8 import FP8

Activation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function of gate and up."""

_ACTIVATIONS: dict[str, Activation] = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "swigluoai": lambda gate, up: gate * torch.sigmoid(1.702 * gate) * (up + 1),
}


def sum_over_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
    run: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Compute `MoeKernel.forward` by calling ``run(expert, x)``, x [N, H], for each expert that has tokens."""
    num_tokens, top_k = topk_ids.shape
    order = topk_ids.flatten().argsort(stable=True)
    num_rows = torch.bincount(topk_ids.flatten(), minlength=num_experts).tolist()
    rows = x[order // top_k]
    outputs = torch.empty_like(rows)
    start = 0
    for expert, stop in enumerate(itertools.accumulate(num_rows)):
        if stop > start:
            outputs[order[start:stop]] = run(expert, rows[start:stop])
        start = stop
    outputs = outputs.view(num_tokens, top_k, -1)
    return torch.einsum("tk,tkh->th", topk_weights, outputs.float()).to(x.dtype)


class TorchMoe(MoeKernel):
    """Sorts the tokens by expert and runs two matmuls per expert that has tokens.

    Matmuls use `x`'s dtype, the weighted sum float32. Quantized weights are dequantized, one expert at a time. On CUDA each call
    synchronizes once, to read the number of tokens per expert, so it cannot be captured in a CUDA graph.
    """

    capabilities = MoeCapabilities(
        activations=tuple(_ACTIVATIONS),
        biases=True,
        swiglu_limit=True,
        weight_dtypes=(FP8, UINT4, MXFP4),
    )

    def __init__(self, spec: MoeSpec) -> None:
        super().__init__(spec)
        self._no_bias = (None,) * spec.num_experts
        self._activate = _clamped(_ACTIVATIONS[spec.activation], spec.swiglu_limit)

    def forward(
        self, x: torch.Tensor, weights: ExpertWeights, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        gate_up = self._by_expert(weights.gate_up, weights.gate_up_scales, weights.gate_up_zeros, self.spec.hidden_size)
        down = self._by_expert(weights.down, weights.down_scales, weights.down_zeros, self.spec.intermediate_size)
        biases = weights.gate_up_bias, weights.down_bias
        gate_up_bias, down_bias = (self._no_bias if each is None else each for each in biases)

        def run(expert: int, rows: torch.Tensor) -> torch.Tensor:
            gate, up = F.linear(rows, gate_up[expert], gate_up_bias[expert]).chunk(2, dim=-1)
            return F.linear(self._activate(gate, up), down[expert], down_bias[expert])

        return sum_over_experts(x, topk_weights, topk_ids, self.spec.num_experts, run)

    def _by_expert(
        self, weight: torch.Tensor, scales: torch.Tensor | None, zeros: torch.Tensor | None, columns: int
    ) -> "torch.Tensor | _LazyDequantized":
        """Return weights that are indexed by the expert."""
        return weight if scales is None else _LazyDequantized(weight, scales, zeros, self.spec.dtype, columns)


class _LazyDequantized:
    """Quantized weights of all experts. Indexing dequantizes one expert's."""

    def __init__(
        self, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, dtype: torch.dtype, columns: int
    ) -> None:
        self._codes, self._scales, self._zeros, self._dtype, self._columns = codes, scales, zeros, dtype, columns

    def __getitem__(self, expert: int) -> torch.Tensor:
        if self._codes.dtype == torch.uint8:
            zeros = None if self._zeros is None else self._zeros[expert]
            return dequantize(self._codes[expert], self._scales[expert], zeros, self._dtype)[:, : self._columns]
        return (self._codes[expert].float() * self._scales[expert, :, None]).to(self._dtype)


def _clamped(activation: Activation, limit: float | None) -> Activation:
    if limit is None:
        return activation
    return lambda gate, up: activation(gate.clamp(max=limit), up.clamp(-limit, limit))
