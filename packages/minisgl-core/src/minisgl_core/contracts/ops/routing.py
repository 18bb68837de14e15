"""Contract of the routing role: selection of experts. See the package for the shape legend."""

import torch

from minisgl_core.contracts.moe import RoutingSpec
from minisgl_core.contracts.ops.provider import OpsProvider


class RoutingOps(OpsProvider):
    """Selection of experts per token."""

    def route(
        self, logits: torch.Tensor, spec: RoutingSpec, correction_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Select experts and compute their weights in float32, following `RoutingSpec`.

        Args:
            logits: logits of the router, [T, E].
            spec: routing rule that `minisgl_core.layers.moe.check_routing` accepts.
            correction_bias: float32 [E], or None.

        Returns:
            The weights, float32 [T, K], and the experts, int64 [T, K].
        """
        is_softmax = spec.scoring == "softmax"
        scores = logits.softmax(dim=-1, dtype=torch.float32) if is_softmax else logits.float().sigmoid()
        choice = scores if correction_bias is None else scores + correction_bias
        if spec.topk_groups < spec.num_groups:
            groups = choice.view(len(choice), spec.num_groups, choice.shape[1] // spec.num_groups)
            group_scores = groups.topk(min(2, groups.shape[-1]), dim=-1)[0].sum(dim=-1)
            best = group_scores.topk(spec.topk_groups, dim=-1)[1]
            is_excluded = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, best, False)
            choice = groups.masked_fill(is_excluded[..., None], -torch.inf).flatten(1)
        weights, ids = choice.topk(spec.top_k, dim=-1)
        if choice is not scores:
            weights = scores.gather(-1, ids)
        if spec.renormalize:
            total = weights.sum(dim=-1, keepdim=True)
            weights = weights / (total if is_softmax else total + 1e-20)  # sigmoids may all be zero
        return (weights if spec.scaling_factor == 1.0 else weights * spec.scaling_factor), ids
