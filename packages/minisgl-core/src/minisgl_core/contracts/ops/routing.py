"""The role of MoE routing. See the package for the shape legend."""

from __future__ import annotations

import torch

from minisgl_core.contracts.ops.provider import OpsProvider


class RoutingOps(OpsProvider):
    """The choice of experts per token."""

    def route(self, logits: torch.Tensor, top_k: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts: the `top_k` largest probabilities of a softmax in float32.

        Args:
            logits: of the router, [T, E].
            top_k: experts per token, K.
            normalize: whether a token's weights are divided by their sum.

        Returns:
            The weights, float32 [T, K]; the experts, int64 [T, K].
        """
        weights, ids = logits.softmax(dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
        return (weights / weights.sum(dim=-1, keepdim=True) if normalize else weights), ids
