"""Rows sorted by expert and cut into blocks of one expert each: what a grouped matrix product runs over."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SortedBlocks:
    """The rows of a batch, one for each token and chosen expert; a row is numbered ``token * K + choice``.

    Sizes depend on the shapes alone, so that the device need not be asked; blocks at the end may be unused.

    Attributes:
        rows: int64 [num_blocks * block_size]; where a block is not full, the number of rows, which is none of them.
        experts: expert of each block, int64 [num_blocks]; the number of experts for an unused block.
        block_size: rows in a block.
    """

    rows: torch.Tensor
    experts: torch.Tensor
    block_size: int


def choose_block_size(num_rows: int, num_experts: int) -> int:
    """Rows in a block: about as many as an expert has, from the 16 that a tensor core takes at least up to 128."""
    block_size = 16
    while block_size < 128 and block_size * num_experts < num_rows:
        block_size *= 2
    return block_size


def sort_into_blocks(expert_ids: torch.Tensor, num_experts: int, block_size: int) -> SortedBlocks:
    """Sort rows by expert and fill up each expert's rows to whole blocks, without waiting for the device.

    The layout is that of vLLM's ``moe_align_block_size``.

    Args:
        expert_ids: int64 [T, K].
        num_experts: E.
        block_size: rows in a block.
    """
    device, num_rows = expert_ids.device, expert_ids.numel()
    num_blocks = min(num_rows, (num_rows + num_experts * (block_size - 1)) // block_size)
    sorted_ids, order = expert_ids.flatten().sort(stable=True)
    ends = torch.searchsorted(sorted_ids, torch.arange(num_experts, device=device), right=True)
    counts = ends.diff(prepend=ends.new_zeros(1))
    block_counts = (counts + block_size - 1) // block_size
    block_ends = block_counts.cumsum(0)
    shift = (block_ends - block_counts) * block_size - (ends - counts)
    rows = torch.full((num_blocks * block_size,), num_rows, device=device)
    rows[torch.arange(num_rows, device=device) + shift[sorted_ids]] = order
    experts = torch.searchsorted(block_ends, torch.arange(num_blocks, device=device), right=True)
    return SortedBlocks(rows, experts, block_size)
