"""The seam for mixture-of-experts kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Shapes of the expert layers, local to a rank.

    Attributes:
        num_experts: experts in a layer, E.
        top_k: experts a token uses, K.
        hidden_size: H.
        intermediate_size: local width of an expert's hidden layer, I.
        dtype: of activations and weights.
        device: where they lie.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype
    device: torch.device


class MoeKernel(ABC):
    """Applies the routed experts to a batch of tokens: gated SiLU MLPs, weighted and summed."""

    plugin_api: ClassVar[str] = ">=2,<3"

    @classmethod
    def unsupported(cls, spec: MoeSpec) -> list[str]:
        """Say why this kernel cannot serve `spec`, one sentence a reason; empty if it can."""
        return []

    def __init__(self, spec: MoeSpec) -> None:
        self.spec = spec

    @abstractmethod
    def forward(
        self,
        x: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        expert_weights: torch.Tensor,
        expert_ids: torch.Tensor,
    ) -> torch.Tensor:
        """Run each token through its experts: ``down @ (silu(gate @ x) * (up @ x))``. Changes none of its inputs.

        Args:
            x: activations, [T, H]; T is at least 1, and rows may be strided.
            gate_up: gate rows above up rows, [E, 2 * I, H], contiguous.
            down: [E, H, I], contiguous.
            expert_weights: how much of each chosen expert, float32 [T, K].
            expert_ids: chosen experts, int64 [T, K], no expert twice in a row.

        Returns:
            The weighted sum over the chosen experts, [T, H], in `x`'s dtype. Products and the sum are accumulated in
            float32.
        """

    def forward_fp8(
        self,
        x: torch.Tensor,
        gate_up: torch.Tensor,
        gate_up_scales: torch.Tensor,
        down: torch.Tensor,
        down_scales: torch.Tensor,
        expert_weights: torch.Tensor,
        expert_ids: torch.Tensor,
    ) -> torch.Tensor:
        """`forward` with experts in float8. Override it: here all of them become numbers of `x`'s dtype in each call.

        Args:
            x: see `forward`; a kernel may turn each token into float8, too, with a scale of its own.
            gate_up: float8_e4m3fn, [E, 2 * I, H], contiguous.
            gate_up_scales: what a row of it is multiplied by, float32 [E, 2 * I].
            down: float8_e4m3fn, [E, H, I], contiguous.
            down_scales: float32 [E, H].
            expert_weights: see `forward`.
            expert_ids: see `forward`.
        """
        wide_gate_up = (gate_up.float() * gate_up_scales[..., None]).to(x.dtype)
        wide_down = (down.float() * down_scales[..., None]).to(x.dtype)
        return self.forward(x, wide_gate_up, wide_down, expert_weights, expert_ids)
