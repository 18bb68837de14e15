"""Columns of each token in the order of its experts, in Triton. Imports triton."""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _gather(x, orders, expert_ids, out, K, x_stride, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(orders + tl.load(expert_ids + row) * K + col, mask=col < K, other=0)
    tl.store(out + row * K + col, tl.load(x + row // TOP_K * x_stride + source, mask=col < K), mask=col < K)


def gather_columns(x: torch.Tensor, orders: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
    """Return a row per token and expert, ``x[token, orders[expert]]``, in one launch: [T * top_k, K].

    Args:
        x: [T, K]; rows may be strided.
        orders: columns in the order of each expert, int32 [E, K].
        expert_ids: int64 [T, top_k].
    """
    (num_tokens, top_k), columns = expert_ids.shape, x.shape[1]
    out = x.new_empty(num_tokens * top_k, columns)
    grid = len(out), triton.cdiv(columns, _BLOCK)
    _gather[grid](x, orders, expert_ids.contiguous(), out, columns, x.stride(0), TOP_K=top_k, BLOCK=_BLOCK)
    return out
