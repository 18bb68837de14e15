"""Kernels of `StepOps`: inputs and outputs of decode steps, gather and scatter.

Shape legend: T tokens, K rows of step inputs, of which `StepOps.decode_inputs` describes the first four.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 128
"""Tokens per program."""
_MAX_COLUMNS = 4096
"""Largest number of columns per program."""


@triton.jit(do_not_specialize=["num_tokens"])
def _decode_inputs(
    mapped_inputs, buffer_index, inputs, last_tokens, table, ids, slots, num_tokens, stride,
    K: tl.constexpr, K_BLOCK: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read the step inputs from mapped pinned memory, [2, K, T]: rows, token ids, positions, new pages, and further ones.

    All loads precede the first use, so that their latencies overlap.
    """
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < num_tokens
    start = mapped_inputs + tl.load(buffer_index) * K * num_tokens + token
    row = tl.load(start, mask=mask, other=0)
    given_id = tl.load(start + num_tokens, mask=mask, other=0)
    position = tl.load(start + 2 * num_tokens, mask=mask, other=0)
    new = tl.load(start + 3 * num_tokens, mask=mask, other=-1)
    kind = 4 + tl.arange(0, K_BLOCK)[:, None]
    rest_mask = (kind < K) & mask[None, :]
    rest = tl.load(start[None, :] + kind * num_tokens, mask=rest_mask, other=0)
    to = inputs + token
    tl.store(to, row, mask=mask)
    tl.store(to + num_tokens, given_id, mask=mask)
    tl.store(to + 2 * num_tokens, position, mask=mask)
    tl.store(to + 3 * num_tokens, new, mask=mask)
    tl.store(to[None, :] + kind * num_tokens, rest, mask=rest_mask)
    row = row.to(tl.int64)
    entry = table + row * stride + position // PAGE_SIZE
    page = tl.where(new < 0, tl.load(entry, mask=mask, other=0), new)
    tl.store(entry, new, mask=mask & (new >= 0))
    tl.store(slots + token, page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE, mask=mask)
    tl.store(ids + token, tl.where(given_id < 0, tl.load(last_tokens + row, mask=mask, other=0), given_id), mask=mask)


def decode_inputs(
    mapped_inputs: torch.Tensor,
    buffer_index: torch.Tensor,
    inputs: torch.Tensor,
    last_tokens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `minisgl_core.contracts.ops.StepOps.decode_inputs`. All tensors but the page table are contiguous."""
    kinds, count = inputs.shape
    ids, slots = (torch.empty(count, dtype=dtype, device=inputs.device) for dtype in (torch.int32, torch.int64))
    _decode_inputs[(triton.cdiv(count, _BLOCK),)](
        mapped_inputs, buffer_index, inputs, last_tokens, page_table, ids, slots, count, page_table.stride(0),
        K=kinds, K_BLOCK=triton.next_power_of_2(max(kinds - 4, 1)), PAGE_SIZE=page_size, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return ids, slots


@triton.jit(do_not_specialize=["num_tokens"])
def _decode_outputs(tokens, rows, last_tokens, mapped_tokens, buffer_index, num_tokens, BLOCK: tl.constexpr):
    """Write tokens to the host and to `last_tokens`, in one program, since it flips `buffer_index` after all threads read it."""
    now = tl.load(buffer_index)
    for start in range(0, num_tokens, BLOCK):
        position = start + tl.arange(0, BLOCK)
        mask = position < num_tokens
        token = tl.load(tokens + position, mask=mask, other=0)
        tl.store(mapped_tokens + now * num_tokens + position, token, mask=mask)
        tl.store(last_tokens + tl.load(rows + position, mask=mask, other=0), token.to(tl.int32), mask=mask)
    tl.debug_barrier()
    tl.store(buffer_index, 1 - now)


def decode_outputs(
    tokens: torch.Tensor,
    rows: torch.Tensor,
    last_tokens: torch.Tensor,
    mapped_tokens: torch.Tensor,
    buffer_index: torch.Tensor,
) -> None:
    """See `minisgl_core.contracts.ops.StepOps.decode_outputs`. All tensors are contiguous."""
    _decode_outputs[(1,)](tokens, rows, last_tokens, mapped_tokens, buffer_index, len(tokens), BLOCK=256, num_warps=4)


@triton.jit(do_not_specialize_on_alignment=["index"])
def _gather_rows(table, index, out, D, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(index + token).to(tl.int64)
    tl.store(out + token * D + column, tl.load(table + row * D + column, mask=column < D), mask=column < D)


def gather_rows(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """See `minisgl_core.contracts.ops.StepOps.gather_rows`."""
    size = table.shape[1]
    out = table.new_empty(len(index), size)
    if out.numel():
        block = min(triton.next_power_of_2(size), _MAX_COLUMNS)
        _gather_rows[(len(index), triton.cdiv(size, block))](table, index, out, size, BLOCK=block, num_warps=4)
    return out


@triton.jit(do_not_specialize=["num_values"], do_not_specialize_on_alignment=["index", "values"])
def _scatter(table, index, values, num_values, BLOCK: tl.constexpr):
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = position < num_values
    value = tl.load(values + position, mask=mask, other=0)
    tl.store(table + tl.load(index + position, mask=mask, other=0), value.to(table.dtype.element_ty), mask=mask)


def scatter(table: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
    """See `minisgl_core.contracts.ops.StepOps.scatter`. All tensors are contiguous."""
    if len(index):
        _scatter[(triton.cdiv(len(index), _BLOCK),)](table, index, values, len(index), BLOCK=_BLOCK, num_warps=4)
