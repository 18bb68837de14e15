"""Contract of quantization providers: how the weights of linear layers and experts are stored, loaded and multiplied.

A provider returns one method object per layer (`minisgl_core.contracts.layer_methods`), which declares the checkpoint's tensors
of that layer: the weight, or packed weights, scales and zero points. Norms and MoE gates are not quantized. Embeddings and the
LM head are quantized only if `Quantization.embedding` returns a method. `Quantization` itself is the provider ``none``.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from minisgl_core.contracts.checkpoint_quantization import CheckpointQuantization
from minisgl_core.contracts.layer_methods import (
    EmbeddingMethod,
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
    """Requirements of a model on its quantization provider.

    Attributes:
        dtype: dtype of activations, and of weights that are not quantized.
        device: device of all tensors.
        num_experts: experts per layer; 0 for dense models.
        checkpoint: quantization of the checkpoint; None if it is not quantized.
    """

    dtype: torch.dtype
    device: torch.device
    num_experts: int = 0
    checkpoint: CheckpointQuantization | None = None


class Quantization:
    """Base class of quantization providers, which leaves all weights in the model's dtype.

    Attributes:
        spec: requirements of the model.
        ops: kernels by role, for the layers that are not quantized.
    """

    plugin_api: ClassVar[str] = ">=2,<3"

    @classmethod
    def unsupported(cls, spec: QuantizationSpec) -> list[str]:
        """Return the reasons why this provider does not support `spec`, one sentence each; empty if it does."""
        return []

    def __init__(self, spec: QuantizationSpec, ops: Ops) -> None:
        """Initialise the provider. It is called once per rank, before the model is built."""
        self.spec, self.ops = spec, ops

    def linear(self, spec: LinearSpec) -> LinearMethod:
        """Return the method of one linear layer, before loading.

        A provider returns ``super().linear(spec)`` for a layer that it does not quantize, such as one that the checkpoint
        leaves unquantized (`CheckpointQuantization.weights_of`). If the checkpoint has quantized weights for such a layer, they
        are dequantized while they are read.
        """
        return PlainLinear(spec, self.ops)

    def embedding(self, spec: LinearSpec) -> EmbeddingMethod | None:
        """Return the method of the token embedding or the LM head; None, the default, for a weight in the model's dtype.

        A tied LM head multiplies by the embedding's weight. Rows are sharded by vocabulary, and there is no bias.
        """
        return None

    def experts(self, spec: ExpertsSpec, kernel: type[MoeKernel]) -> ExpertsMethod:
        """Return the method of one layer's experts, before loading.

        Raises:
            ProviderUnsupportedError: the kernel cannot serve these experts.
        """
        return InterleavedExperts(spec, kernel) if spec.is_stacked else PlainExperts(spec, kernel)
