"""What a step begins and ends with: tokens, slots, and rows of tables."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 128
_MOST_COLUMNS = 4096


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["rows", "ids", "positions", "new_pages"])
def _decode_inputs(
    rows, ids, positions, new_pages, last_tokens, table, known, slots, num_tokens, stride,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < num_tokens
    row = tl.load(rows + token, mask=mask, other=0).to(tl.int64)
    position = tl.load(positions + token, mask=mask, other=0)
    entry = table + row * stride + position // PAGE_SIZE
    new = tl.load(new_pages + token, mask=mask, other=-1)
    page = tl.where(new < 0, tl.load(entry, mask=mask, other=0), new)
    tl.store(entry, new, mask=mask & (new >= 0))
    tl.store(slots + token, page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE, mask=mask)
    given = tl.load(ids + token, mask=mask, other=0)
    tl.store(known + token, tl.where(given < 0, tl.load(last_tokens + row, mask=mask, other=0), given), mask=mask)


def decode_inputs(
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    new_pages: torch.Tensor,
    last_tokens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `minisgl_core.contracts.ops.Ops.decode_inputs`; all are contiguous but for rows of the page table."""
    count = len(rows)
    known, slots = torch.empty_like(token_ids), torch.empty(count, dtype=torch.int64, device=rows.device)
    if count:
        _decode_inputs[(triton.cdiv(count, _BLOCK),)](
            rows, token_ids, positions, new_pages, last_tokens, page_table, known, slots, count, page_table.stride(0),
            PAGE_SIZE=page_size, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    return known, slots


@triton.jit(do_not_specialize_on_alignment=["index"])
def _take_rows(table, index, out, D, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(index + token).to(tl.int64)
    tl.store(out + token * D + column, tl.load(table + row * D + column, mask=column < D), mask=column < D)


def take_rows(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """See `minisgl_core.contracts.ops.Ops.take_rows`."""
    size = table.shape[1]
    out = table.new_empty(len(index), size)
    if out.numel():
        block = min(triton.next_power_of_2(size), _MOST_COLUMNS)
        _take_rows[(len(index), triton.cdiv(size, block))](table, index, out, size, BLOCK=block, num_warps=4)
    return out


@triton.jit(do_not_specialize=["num_values"], do_not_specialize_on_alignment=["index", "values"])
def _put(table, index, values, num_values, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < num_values
    value = tl.load(values + place, mask=mask, other=0)
    tl.store(table + tl.load(index + place, mask=mask, other=0), value.to(table.dtype.element_ty), mask=mask)


def put(table: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
    """See `minisgl_core.contracts.ops.Ops.put`; all are contiguous."""
    if len(index):
        _put[(triton.cdiv(len(index), _BLOCK),)](table, index, values, len(index), BLOCK=_BLOCK, num_warps=4)
