"""MoE routing in one launch: softmax, top-k, and the weights of the selected experts.

Shape legend: T tokens, E experts, K experts per token.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _route(
    logits, weights, ids, num_experts, stride,
    K: tl.constexpr, K_BLOCK: tl.constexpr, E_BLOCK: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    expert, rank = tl.arange(0, E_BLOCK), tl.arange(0, K_BLOCK)
    values = tl.load(logits + token * stride + expert, mask=expert < num_experts, other=float("-inf")).to(tl.float32)
    left = tl.exp(values - tl.max(values, 0))
    left = tl.where(expert < num_experts, left / tl.sum(left, 0), -1.0)
    best, chosen = tl.zeros((K_BLOCK,), tl.float32), tl.zeros((K_BLOCK,), tl.int64)
    for k in tl.static_range(K):
        most = tl.max(left, 0)
        found = tl.min(tl.where(left == most, expert, num_experts - 1), 0)  # in bounds even if logits are NaN
        best, chosen = tl.where(rank == k, most, best), tl.where(rank == k, found.to(tl.int64), chosen)
        left = tl.where(expert == found, -1.0, left)
    if NORMALIZE:
        best = best / tl.sum(best, 0)
    tl.store(weights + token * K + rank, best, mask=rank < K)
    tl.store(ids + token * K + rank, chosen, mask=rank < K)


def route(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Route by softmax over all experts, without groups; see `RoutingOps.route`. Rows of `logits` are contiguous."""
    num_tokens, num_experts = logits.shape
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits.device)
    if num_tokens:
        _route[(num_tokens,)](
            logits, weights, ids, num_experts, logits.stride(0),
            K=top_k, K_BLOCK=triton.next_power_of_2(top_k), E_BLOCK=triton.next_power_of_2(num_experts),
            NORMALIZE=renormalize, num_warps=1,
        )  # fmt: skip
    return weights, ids
