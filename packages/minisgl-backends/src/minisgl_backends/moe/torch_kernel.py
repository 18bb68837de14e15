"""Mixture of experts in plain torch: the reference, on any device."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from minisgl_core.contracts.moe import MoeKernel


class TorchMoe(MoeKernel):
    """Sorts the tokens by expert, then two matrix products for each expert that has any.

    Products are in `x`'s dtype, the weighted sum in float32. On CUDA there is one wait for the device a call, for how many
    tokens each expert has; so it cannot be captured in a graph.
    """

    def forward(
        self,
        x: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        expert_weights: torch.Tensor,
        expert_ids: torch.Tensor,
    ) -> torch.Tensor:
        """See `MoeKernel.forward`."""
        num_tokens, top_k = expert_ids.shape
        order = expert_ids.flatten().argsort(stable=True)
        num_rows = torch.bincount(expert_ids.flatten(), minlength=self.spec.num_experts).tolist()
        rows = x[order // top_k]
        outputs = torch.empty_like(rows)
        start = 0
        for expert, stop in enumerate(itertools.accumulate(num_rows)):
            if stop > start:
                gate, up = F.linear(rows[start:stop], gate_up[expert]).chunk(2, dim=-1)
                outputs[order[start:stop]] = F.linear(F.silu(gate) * up, down[expert])
            start = stop
        outputs = outputs.view(num_tokens, top_k, -1)
        return torch.einsum("tk,tkh->th", expert_weights, outputs.float()).to(x.dtype)
