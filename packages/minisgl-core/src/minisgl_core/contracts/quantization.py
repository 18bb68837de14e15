"""The seam for matrices of fewer bits: how the layers' linear products hold their weights and are computed.

A provider gets each matrix once, in the model's dtype, after loading, and returns what multiplies by it. How a checkpoint stores
its matrices is not its matter: a `WeightSource` reads them into the model's dtype. Embeddings, the output matrix, norms and
routers never come here. `Quantization` is itself the provider ``none``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from minisgl_core.contracts.moe import ExpertWeights, MoeKernel
from minisgl_core.contracts.ops import LinearOp, Ops

ExpertsOp = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""x, topk_weights and topk_ids to what `MoeKernel.forward` returns."""


@dataclass(frozen=True, slots=True)
class QuantizationSpec:
    """What decides whether a provider can serve a model.

    Attributes:
        dtype: of activations, and of the matrices before they are quantised.
        device: where they lie.
        num_experts: experts in a layer; 0 where the model has none.
    """

    dtype: torch.dtype
    device: torch.device
    num_experts: int = 0


class Quantization:
    """Weights as they are, multiplied by `LinearOps`."""

    plugin_api: ClassVar[str] = ">=2,<3"
    expert_dtype: ClassVar[torch.dtype | None] = None
    """Dtype of the experts' matrices that `prepare_experts` hands to the kernel; None for the model's."""

    @classmethod
    def unsupported(cls, spec: QuantizationSpec) -> list[str]:
        """Say why this provider cannot serve `spec`, one sentence a reason; empty if it can."""
        return []

    def __init__(self, spec: QuantizationSpec, ops: Ops) -> None:
        """`ops`: for whatever is not quantised."""
        self.spec, self.ops = spec, ops

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        """Called once a matrix, after loading: returns what computes about ``x -> x @ weight.T + bias``, in x's dtype.

        A row of the result depends on that row of x alone. The matrix is the provider's; it must not keep it besides a
        quantised copy, and may take the memory of another one like it meanwhile, but no more.

        Args:
            weight: [out, in], this rank's part; rows and columns that are padding are zero.
            bias: [out] or None.
        """
        return self.ops.linear.prepare_linear(weight, bias)

    def prepare_gated(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        """Like `prepare_linear`, for a gated MLP: ``x -> silu_and_mul(x @ weight.T + bias)``.

        Args:
            weight: gate rows above up rows, [2 * I, in].
            bias: [2 * I] or None.
        """
        return self.ops.linear.prepare_gated(weight, bias)

    def prepare_experts(self, kernel: MoeKernel, weights: ExpertWeights) -> ExpertsOp:
        """Like `prepare_linear`, for a layer's experts: returns what computes about ``kernel.forward(x, weights, ...)``.

        Args:
            kernel: of the layer, made for experts of `expert_dtype`.
            weights: this rank's part, without scales; rows and columns that are padding are zero.
        """
        return lambda x, topk_weights, topk_ids: kernel.forward(x, weights, topk_weights, topk_ids)
