"""Contract of mixture-of-experts kernels, and the routing to experts.

Shape legend: T tokens, E experts, K experts per token, H hidden size, I an expert's intermediate size on this rank.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import torch

from minisgl_core.utils.dtypes import dtype_name

UINT4: torch.dtype = torch.uint4  # type: ignore[attr-defined]
"""`MoeSpec.weight_dtype` of packed 4-bit integers; see `ExpertWeights`."""
MXFP4: torch.dtype = torch.float4_e2m1fn_x2
"""`MoeSpec.weight_dtype` of packed weights in OCP's MXFP4; see `ExpertWeights`."""


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Requirements of a layer's experts on the kernel. Sizes are local to a rank.

    A kernel refuses requirements that it does not support; `MoeCapabilities.missing` returns the reasons.

    Attributes:
        num_experts: experts per layer, E.
        top_k: experts per token, K.
        hidden_size: H.
        intermediate_size: I.
        dtype: dtype of activations, biases and the output.
        device: device of all tensors.
        activation: elementwise function of gate and up. ``silu``: ``silu(gate) * up``. ``gelu_tanh``: ``gelu(gate) * up`` with
            GELU's tanh approximation. ``swigluoai`` (gpt-oss): ``gate * sigmoid(1.702 * gate) * (up + 1)``.
        has_bias: True if the projections have biases.
        swiglu_limit: before the activation, gate is clamped to at most this value, and up to
            ``[-swiglu_limit, swiglu_limit]``; None for no clamp.
        weight_dtype: dtype of the experts' weights; None for `dtype`. `UINT4` and `MXFP4` are packed; see `ExpertWeights`.
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
    """Capabilities of a MoE kernel.

    Attributes:
        activations: supported values of `MoeSpec.activation`.
        biases: supports experts with biases.
        swiglu_limit: supports `MoeSpec.swiglu_limit`.
        weight_dtypes: supported dtypes of quantized weights, which come with scales. `MoeSpec.dtype` is always supported.
    """

    activations: tuple[str, ...] = ("silu",)
    biases: bool = False
    swiglu_limit: bool = False
    weight_dtypes: tuple[torch.dtype, ...] = ()

    def missing(self, spec: MoeSpec) -> list[str]:
        """Return the requirements of `spec` that these capabilities do not meet, one sentence per reason."""
        own = {each.name for each in fields(spec)} - {each.name for each in fields(MoeSpec)}
        supported = (spec.dtype, *self.weight_dtypes)
        wanted = spec.weight_dtype or spec.dtype
        names = " or ".join(map(dtype_name, supported))
        lacks = {
            f"it does not know the fields {', '.join(sorted(own))} of {type(spec).__name__}": bool(own),
            f"it supports the activations {', '.join(self.activations)}, not {spec.activation}": (
                spec.activation not in self.activations
            ),
            "it does not support biases of experts": spec.has_bias and not self.biases,
            f"it does not clamp gate and up (swiglu_limit={spec.swiglu_limit})": (
                spec.swiglu_limit is not None and not self.swiglu_limit
            ),
            f"the experts' weights must be {names}, not {dtype_name(wanted)}": wanted not in supported,
        }
        return [reason for reason, is_lacking in lacks.items() if is_lacking]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """Parameters of a layer's experts, each contiguous and on `MoeSpec.device`.

    Packed weights, `UINT4` and `MXFP4`, and their scales have other shapes and dtypes than listed: see below.

    Attributes:
        gate_up: gate rows, then up rows, [E, 2 * I, H], in `MoeSpec.weight_dtype`.
        down: [E, H, I], in `MoeSpec.weight_dtype`.
        gate_up_bias: [E, 2 * I], in `MoeSpec.dtype`; None if `MoeSpec.has_bias` is False.
        down_bias: [E, H], in `MoeSpec.dtype`. It is added to an expert's output before the weighted sum.
        gate_up_scales: scales of the rows of `gate_up`, float32 [E, 2 * I]; None if `gate_up` is not quantized.
        down_scales: scales of the rows of `down`, float32 [E, H]; None if `down` is not quantized.
        gate_up_zeros: zero points of `gate_up` in `UINT4`, uint8 in the shape of its scales; None if all are 8.
        down_zeros: likewise, of `down`.

    Packed weights are uint8 [E, N, G * B / 2], where N is 2 * I for `gate_up` and H for `down`. The inputs of a row form G groups
    of B, a multiple of 32, and each group has a scale. A byte has the codes of two consecutive inputs, the first in its low bits.
    Codes beyond a row's inputs have no meaning.

    - `UINT4`: a weight is ``(code - zero point) * scale``. Scales are in `MoeSpec.dtype`, [E, N, G].
    - `MXFP4`: a code is a float of OCP's format e2m1, and B is 32. Scales are of e8m0, uint8 [E, N, G].
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gate_up_scales: torch.Tensor | None = None
    down_scales: torch.Tensor | None = None
    gate_up_zeros: torch.Tensor | None = None
    down_zeros: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class RoutingSpec:
    """Rule that selects a token's experts and their weights from the router's logits.

    1. `scoring` converts the logits to scores.
    2. The correction bias, if there is one, is added to the scores for the selection only (DeepSeek-V3).
    3. A group's score is the sum of its two highest scores. Experts outside the best `topk_groups` groups are excluded.
    4. The best `top_k` experts are selected. Their weights are their scores without the bias, renormalized and scaled.

    Attributes:
        top_k: experts per token, K.
        renormalize: True to divide a token's weights by their sum.
        scoring: softmax over all experts, or a sigmoid per expert.
        num_groups: number of groups of consecutive experts, all of one size.
        topk_groups: number of groups that a token's experts may come from.
        scaling_factor: factor on the weights, after the renormalization.
    """

    top_k: int
    renormalize: bool
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1
    topk_groups: int = 1
    scaling_factor: float = 1.0

    @property
    def is_plain(self) -> bool:
        """Return True for softmax over all experts without groups and scaling, which fused kernels support."""
        return self.scoring == "softmax" and self.topk_groups == self.num_groups and self.scaling_factor == 1.0


class MoeKernel(ABC):
    """MoE kernel: applies the routed experts, which are gated MLPs, to a batch of tokens and sums their weighted outputs."""

    plugin_api: ClassVar[str] = ">=2,<3"
    capabilities: MoeCapabilities = MoeCapabilities()
    """Capabilities, set on the class. A spec that needs others is refused."""

    @classmethod
    def unsupported(cls, spec: MoeSpec) -> list[str]:
        """Return the reasons why this kernel does not support `spec`, one sentence each; empty if it does.

        An override extends these reasons, which are those of `capabilities`.
        """
        return cls.capabilities.missing(spec)

    def __init__(self, spec: MoeSpec) -> None:
        """Initialise the kernel for `spec`, for which `unsupported` returned nothing."""
        self.spec = spec

    @abstractmethod
    def forward(
        self, x: torch.Tensor, weights: ExpertWeights, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """Run each token through its experts: ``down @ activation(gate @ x, up @ x)``. The inputs are not modified.

        Args:
            x: activations, [T, H]; T is at least 1, and rows may be strided. If the weights are quantized, a kernel may
                quantize `x` too, with a scale per token.
            weights: parameters.
            topk_weights: weights of the selected experts' outputs, float32 [T, K].
            topk_ids: selected experts, int64 [T, K]; the experts of a token are distinct.

        Returns:
            The weighted sum over the selected experts, [T, H], in `x`'s dtype. It is a new tensor, which the caller may
            overwrite. Matmuls and the sum accumulate in float32.
        """
