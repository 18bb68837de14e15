"""Sort of (token, expert) pairs into blocks of one expert each, over which a grouped GEMM runs.

Shape legend: T tokens, top_k experts per token, R = T * top_k rows, E experts.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_CHUNK = 2048


@dataclass(frozen=True, slots=True)
class SortedBlocks:
    """Rows of a batch in blocks. Row ``token * top_k + i`` belongs to the i-th expert that the router selected for the token.

    The sizes depend on shapes alone, so the CPU does not wait for the device. Blocks at the end may be unused.

    Attributes:
        rows: row indices, int32 [num_blocks * block_size]. A partial block is padded with the total number of rows, which is
            not a valid index. The content of unused blocks is undefined.
        experts: expert of each block, int32 [num_blocks]; the number of experts for an unused block.
        block_size: rows per block.
    """

    rows: torch.Tensor
    experts: torch.Tensor
    block_size: int


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])  # type: ignore[untyped-decorator]
def _sort(  # type: ignore[no-untyped-def]
    ids,  # [R]
    rows,
    experts,
    num_rows,
    num_blocks,
    num_experts,
    BLOCK_SIZE: tl.constexpr,
    E_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program e writes the blocks of expert e, and the last program marks the unused blocks. Each program counts all rows."""
    own_expert = tl.program_id(0)
    lane, all_experts = tl.arange(0, CHUNK), tl.arange(0, E_BLOCK)
    counts = tl.zeros((E_BLOCK,), dtype=tl.int32)
    for start in range(0, num_rows, CHUNK):
        chunk = tl.load(ids + start + lane, mask=start + lane < num_rows, other=num_experts)
        counts += tl.histogram(chunk.to(tl.int32), E_BLOCK)
    blocks = (counts + BLOCK_SIZE - 1) // BLOCK_SIZE
    first = tl.sum(tl.where(all_experts < own_expert, blocks, 0))
    end = num_blocks if own_expert == num_experts else first + tl.sum(tl.where(all_experts == own_expert, blocks, 0))
    for start in range(first, end, CHUNK):
        tl.store(experts + start + lane, own_expert, mask=start + lane < end)
    if own_expert < num_experts:
        out, count = rows + first * BLOCK_SIZE, 0
        for start in range(0, num_rows, CHUNK):
            hit = tl.load(ids + start + lane, mask=start + lane < num_rows, other=num_experts) == own_expert
            position = count + tl.cumsum(hit.to(tl.int32), 0) - 1
            tl.store(out + position, start + lane, mask=hit)
            count += tl.sum(hit.to(tl.int32))
        padding = count + tl.arange(0, BLOCK_SIZE)
        tl.store(out + padding, num_rows, mask=padding < (end - first) * BLOCK_SIZE)


def sort_into_blocks(expert_ids: torch.Tensor, num_experts: int, block_size: int) -> SortedBlocks:
    """Sort rows by expert and pad each expert's rows to whole blocks, in one launch and without a device synchronization.

    The layout is that of vLLM's ``moe_align_block_size``.

    Args:
        expert_ids: int64 [T, top_k], contiguous.
        num_experts: number of experts.
        block_size: rows per block, a power of two.
    """
    device, num_rows = expert_ids.device, expert_ids.numel()
    num_blocks = min(num_rows, (num_rows + num_experts * (block_size - 1)) // block_size)
    rows = torch.empty(num_blocks * block_size, dtype=torch.int32, device=device)
    experts = torch.empty(num_blocks, dtype=torch.int32, device=device)
    chunk = min(_CHUNK, triton.next_power_of_2(num_rows))
    sizes = {"BLOCK_SIZE": block_size, "E_BLOCK": triton.next_power_of_2(num_experts + 1), "CHUNK": max(chunk, 16)}
    _sort[(num_experts + 1,)](expert_ids, rows, experts, num_rows, num_blocks, num_experts, **sizes)
    return SortedBlocks(rows, experts, block_size)
