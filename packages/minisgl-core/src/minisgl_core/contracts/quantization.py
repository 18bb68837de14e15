"""The contract of quantization: how the layers' weights are stored, loaded and multiplied.

A provider makes one method object per layer (`minisgl_core.contracts.layer_methods`), which knows the tensors that the
checkpoint has for it: the weight, or packed weights, scales and zero points. Embeddings, the output matrix, norms and routers
never come here. `Quantization` is itself the provider ``none``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from minisgl_core.contracts.checkpoint_quantization import CheckpointQuantization
from minisgl_core.contracts.layer_methods import (
    ExpertsMethod,
    ExpertsSpec,
    InterleavedExperts,
    LinearMethod,
    LinearSpec,
    PlainExperts,
    PlainLinear,
)
from minisgl_core.contracts.moe import MoeKernel
from minisgl_core.contracts.ops import Ops


@dataclass(frozen=True, slots=True)
class QuantizationSpec:
    """All that decides whether a provider can serve a model.

    Attributes:
        dtype: of activations, and of weights that are not quantized.
        device: of all tensors.
        num_experts: experts in a layer; 0 where the model has none.
        checkpoint: how the checkpoint stores its weights; None where they are not quantized.
    """

    dtype: torch.dtype
    device: torch.device
    num_experts: int = 0
    checkpoint: CheckpointQuantization | None = None


class Quantization:
    """Weights in the model's dtype, multiplied by the `Ops`.

    Attributes:
        spec: the model.
        ops: multiply by whatever is not quantized.
    """

    plugin_api: ClassVar[str] = ">=2,<3"

    @classmethod
    def unsupported(cls, spec: QuantizationSpec) -> list[str]:
        """Say why this provider cannot serve `spec`, one sentence per reason; empty if it can."""
        return []

    def __init__(self, spec: QuantizationSpec, ops: Ops) -> None:
        """Called once per rank, before the model is built."""
        self.spec, self.ops = spec, ops

    def linear(self, spec: LinearSpec) -> LinearMethod:
        """Return the method of one linear layer, before loading.

        A provider returns ``super().linear(spec)`` for a layer that it does not quantize, such as one that the checkpoint
        leaves unquantized (`CheckpointQuantization.weights_of`). What the checkpoint stores quantized all the same is
        dequantized for it while it is read.
        """
        return PlainLinear(spec, self.ops)

    def experts(self, spec: ExpertsSpec, kernel: type[MoeKernel]) -> ExpertsMethod:
        """Return the method of one layer's experts, likewise.

        Raises:
            ProviderUnsupportedError: the kernel cannot serve these experts.
        """
        return InterleavedExperts(spec, kernel) if spec.interleaved else PlainExperts(spec, kernel)
