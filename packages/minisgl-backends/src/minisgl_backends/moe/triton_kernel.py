"""Mixture of experts in Triton: rows sorted by expert, two grouped matrix products, a sum over the choices."""

from __future__ import annotations

import importlib.util
import os

import torch

from minisgl_backends.moe.tiles import choose_block_size, choose_tiles
from minisgl_core.contracts.moe import MoeKernel, MoeSpec

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TritonMoe(MoeKernel):
    """Products and the weighted sum are in float32, what lies between them in `x`'s dtype. Never waits for the device.

    Runs on a CPU too, under Triton's interpreter (TRITON_INTERPRET=1), which is slow and meant for tests.
    """

    @classmethod
    def unsupported(cls, spec: MoeSpec) -> list[str]:
        """Names what is missing of triton, a GPU, and a dtype that both take; does not import triton."""
        reasons = []
        if importlib.util.find_spec("triton") is None:
            reasons.append("triton is not installed (pip install triton)")
        if spec.device.type != "cuda" and not _interpreted():
            reasons.append(f"it needs a CUDA device, not {spec.device.type}, or TRITON_INTERPRET=1 to try it slowly")
        if spec.dtype not in _DTYPES:
            reasons.append(f"it computes in bfloat16, float16 or float32, not {str(spec.dtype).removeprefix('torch.')}")
        return reasons

    def __init__(self, spec: MoeSpec) -> None:
        super().__init__(spec)
        from minisgl_backends.kernels import device, quantize  # not before: listing providers must not need triton
        from minisgl_backends.moe import sorted_blocks, triton_grouped

        self._blocks, self._grouped, self._quantize_rows = sorted_blocks, triton_grouped, quantize.quantize_rows
        self._large_memory = device.has_large_shared_memory(spec.device)
        is_gpu = spec.device.type == "cuda"
        self._multiplies_fp8 = not is_gpu or torch.cuda.get_device_capability(spec.device) >= (8, 9)

    def forward(
        self,
        x: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        expert_weights: torch.Tensor,
        expert_ids: torch.Tensor,
    ) -> torch.Tensor:
        """See `MoeKernel.forward`; weights must be contiguous."""
        return self._forward(x, gate_up, None, down, None, expert_weights, expert_ids)

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
        """See `MoeKernel.forward_fp8`: tokens become float8, too, and so does what lies between the products."""
        if not self._multiplies_fp8:
            return super().forward_fp8(x, gate_up, gate_up_scales, down, down_scales, expert_weights, expert_ids)
        return self._forward(x, gate_up, gate_up_scales, down, down_scales, expert_weights, expert_ids)

    def _forward(
        self,
        x: torch.Tensor,
        gate_up: torch.Tensor,
        gate_up_scales: torch.Tensor | None,
        down: torch.Tensor,
        down_scales: torch.Tensor | None,
        expert_weights: torch.Tensor,
        expert_ids: torch.Tensor,
    ) -> torch.Tensor:
        num_tokens, top_k = expert_ids.shape
        num_rows, num_experts = num_tokens * top_k, self.spec.num_experts
        block_size = choose_block_size(num_rows, num_experts)
        blocks = self._blocks.sort_into_blocks(expert_ids.contiguous(), num_experts, block_size)
        first, second = choose_tiles(num_rows, block_size, gate_up.element_size(), self._large_memory)
        hidden = x.new_empty(num_rows, self.spec.intermediate_size)
        self._grouped.gate_up_silu(
            *self._inputs(x.contiguous(), gate_up_scales), gate_up, gate_up_scales, hidden, blocks, top_k, first
        )
        rows = x.new_empty(num_rows, self.spec.hidden_size)
        self._grouped.weighted_down(
            *self._inputs(hidden, down_scales), down, down_scales, expert_weights.contiguous(), rows, blocks, second
        )
        out = x.new_empty(num_tokens, self.spec.hidden_size)
        self._grouped.sum_choices(rows, out)
        return out

    def _inputs(
        self, x: torch.Tensor, scales_of_weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows as they are multiplied, and their scales, where weights have scales."""
        return (x, None) if scales_of_weights is None else self._quantize_rows(x)


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
