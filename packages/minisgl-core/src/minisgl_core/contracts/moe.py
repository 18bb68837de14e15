"""The contract of mixture-of-experts kernels, and the routing to experts.

Shape legend: T tokens, E experts, K experts per token, H hidden size, I width of an expert's hidden layer on this rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import torch


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """All that decides whether and how a kernel can serve the experts of a layer; sizes are local to a rank.

    A kernel refuses what it lacks: `MoeCapabilities.missing` has the reasons.

    Attributes:
        num_experts: experts in a layer, E.
        top_k: experts per token, K.
        hidden_size: H.
        intermediate_size: I.
        dtype: of activations, biases and the output.
        device: of all tensors.
        activation: joins gate and up, elementwise. ``silu``: ``silu(gate) * up``. ``gelu_tanh``: ``gelu(gate) * up`` with
            GELU's tanh approximation. ``swigluoai`` (gpt-oss): ``gate * sigmoid(1.702 * gate) * (up + 1)``.
        has_bias: the projections have biases.
        swiglu_limit: before the activation, gate is clamped to at most this, and up to ``[-swiglu_limit, swiglu_limit]``;
            None for no clamp.
        weight_dtype: of the experts' matrices; None for `dtype`.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype
    device: torch.device
    activation: str = "silu"
    has_bias: bool = False
    swiglu_limit: float | None = None
    weight_dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeCapabilities:
    """Tells the engine what a kernel can do.

    Attributes:
        activations: serves these; see `MoeSpec.activation`.
        biases: serves experts with biases.
        swiglu_limit: serves `MoeSpec.swiglu_limit`.
        weight_dtypes: of matrices that the kernel takes with scales, besides those in `MoeSpec.dtype`.
    """

    activations: tuple[str, ...] = ("silu",)
    biases: bool = False
    swiglu_limit: bool = False
    weight_dtypes: tuple[torch.dtype, ...] = ()

    def missing(self, spec: MoeSpec) -> list[str]:
        """Return what `spec` asks for and these capabilities lack, one sentence per reason."""
        own = {each.name for each in fields(spec)} - {each.name for each in fields(MoeSpec)}
        held = (spec.dtype, *self.weight_dtypes)
        wanted = spec.weight_dtype or spec.dtype
        lacks = {
            f"it does not know the fields {', '.join(sorted(own))} of {type(spec).__name__}": bool(own),
            f"it has the activations {', '.join(self.activations)}, not {spec.activation}": (
                spec.activation not in self.activations
            ),
            "it has no biases of experts": spec.has_bias and not self.biases,
            f"it does not clamp gate and up (swiglu_limit={spec.swiglu_limit})": (
                spec.swiglu_limit is not None and not self.swiglu_limit
            ),
            f"the experts' weights must be {' or '.join(map(_name, held))}, not {_name(wanted)}": wanted not in held,
        }
        return [reason for reason, is_lacking in lacks.items() if is_lacking]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """The parameters of a layer's experts, each contiguous and on `MoeSpec.device`.

    Attributes:
        gate_up: gate rows above up rows, [E, 2 * I, H], in `MoeSpec.weight_dtype`.
        down: likewise, [E, H, I].
        gate_up_bias: [E, 2 * I], in `MoeSpec.dtype`; None where `MoeSpec.has_bias` is false.
        down_bias: likewise, [E, H]. An expert's output includes it before the weighted sum.
        gate_up_scales: factors of the rows of `gate_up`, float32 [E, 2 * I]; None where it is in `MoeSpec.dtype`.
        down_scales: likewise of `down`, float32 [E, H].
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gate_up_scales: torch.Tensor | None = None
    down_scales: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class RoutingSpec:
    """The rule by which a router's logits choose a token's experts and weigh them.

    1. `scoring` turns the logits into scores.
    2. Scores plus the correction bias, where there is one, decide the choice and nothing else (DeepSeek-V3).
    3. A group's score is the sum of its best two experts; only experts of the best `topk_groups` groups may be chosen.
    4. The best `top_k` experts are chosen, and their scores are the weights: without the bias, renormalized, scaled.

    Attributes:
        top_k: experts per token, K.
        renormalize: a token's weights are divided by their sum.
        scoring: softmax over all experts, or each expert's sigmoid.
        num_groups: groups of neighbouring experts, all of one size.
        topk_groups: groups that a token's experts may come from.
        scaling_factor: of the weights, after the renormalization.
    """

    top_k: int
    renormalize: bool
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1
    topk_groups: int = 1
    scaling_factor: float = 1.0

    @property
    def is_plain(self) -> bool:
        """Return whether this is softmax over all experts without groups and scaling, which fused kernels serve."""
        return self.scoring == "softmax" and self.topk_groups == self.num_groups and self.scaling_factor == 1.0


class MoeKernel(ABC):
    """Applies the routed experts to a batch of tokens: gated MLPs, weighted and summed."""

    plugin_api: ClassVar[str] = ">=2,<3"
    capabilities: MoeCapabilities = MoeCapabilities()
    """Set on the class. What it does not declare is refused."""

    @classmethod
    def unsupported(cls, spec: MoeSpec) -> list[str]:
        """Say why this kernel cannot serve `spec`, one sentence per reason; empty if it can.

        An override begins with these reasons, which are those of `capabilities`.
        """
        return cls.capabilities.missing(spec)

    def __init__(self, spec: MoeSpec) -> None:
        """Prepare for `spec`, for which `unsupported` returned nothing."""
        self.spec = spec

    @abstractmethod
    def forward(
        self, x: torch.Tensor, weights: ExpertWeights, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """Run each token through its experts: ``down @ activation(gate @ x, up @ x)``. Changes none of its inputs.

        Args:
            x: activations, [T, H]; T is at least 1, and rows may be strided. With quantized weights, a kernel may quantize
                each token, too, with a scale of its own.
            weights: as `MoeSpec` announces them.
            topk_weights: factors of the chosen experts' outputs, float32 [T, K].
            topk_ids: chosen experts, int64 [T, K], no expert twice in a row.

        Returns:
            The weighted sum over the chosen experts, [T, H], in `x`'s dtype: a tensor of its own, which the caller may
            overwrite. Matmuls and the sum are accumulated in float32.
        """
