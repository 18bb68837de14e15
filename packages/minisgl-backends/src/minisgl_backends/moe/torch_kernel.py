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
        self._activate = _clamped(_ACTIVATIONS[spec.activation], spec.swiglu_limit)

    def forward(
        self, x: torch.Tensor, weights: ExpertWeights, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        gate_up = weights.gate_up, weights.gate_up_scales, weights.gate_up_zeros, weights.gate_up_bias
        down = weights.down, weights.down_scales, weights.down_zeros, weights.down_bias

        def run(expert: int, rows: torch.Tensor) -> torch.Tensor:
            gate, up = _linear(rows, expert, *gate_up).chunk(2, dim=-1)
            return _linear(self._activate(gate, up), expert, *down)

        return sum_over_experts(x, topk_weights, topk_ids, self.spec.num_experts, run)


def _linear(
    x: torch.Tensor,
    expert: int,
    weights: torch.Tensor,
    scales: torch.Tensor | None,
    zeros: torch.Tensor | None,
    biases: torch.Tensor | None,
) -> torch.Tensor:
    """Apply a projection of one expert; see `ExpertWeights`."""
    weight = weights[expert]
    if scales is not None and weight.dtype == torch.uint8:
        weight = dequantize(weight, scales[expert], None if zeros is None else zeros[expert], x.dtype)[:, : x.shape[1]]
    elif scales is not None:
        weight = (weight.float() * scales[expert, :, None]).to(x.dtype)
    return F.linear(x, weight, None if biases is None else biases[expert])


def _clamped(activation: Activation, limit: float | None) -> Activation:
    if limit is None:
        return activation
    return lambda gate, up: activation(gate.clamp(max=limit), up.clamp(-limit, limit))
