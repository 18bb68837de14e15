"""Kernels of the paged KV pool: KV store, and page lists from the page table.

Shape legend: T tokens, Hkv heads, D head dimension, P pages of S tokens, B requests, R rows and M columns of the page table.
"""

import torch
import triton
import triton.language as tl

from minisgl_backends.kernels.fp8 import to_pool_dtype


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _store_kv(
    k, v, k_stride_t, k_stride_h, v_stride_t, v_stride_h, k_pool, v_pool, slots, k_scale, v_scale, heads,
    D: tl.constexpr, D_BLOCK: tl.constexpr, H_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    head, column = tl.arange(0, H_BLOCK)[:, None], tl.arange(0, D_BLOCK)[None, :]
    mask = (head < heads) & (column < D)
    target = slot * heads * D + head * D + column
    values = tl.load(k + token * k_stride_t + head * k_stride_h + column, mask=mask, other=0.0)
    tl.store(k_pool + target, to_pool_dtype(values, k_scale, k_pool), mask=mask)
    values = tl.load(v + token * v_stride_t + head * v_stride_h + column, mask=mask, other=0.0)
    tl.store(v_pool + target, to_pool_dtype(values, v_scale, v_pool), mask=mask)


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Store K and V of a layer into their slots, in one launch.

    Args:
        k: [T, Hkv, D], contiguous in the last dimension.
        v: like k.
        k_pages: K of the layer, [P, S, Hkv, D], contiguous.
        v_pages: like k_pages.
        slots: ``page * S + offset`` of each token, int64 [T].
        scales: scales of k and v in FP8 pages; see `AttentionLayer.kv_scales`.
    """
    num_tokens, heads, dim = k.shape
    if num_tokens == 0:
        return
    blocks = {"D": dim, "D_BLOCK": triton.next_power_of_2(dim), "H_BLOCK": triton.next_power_of_2(heads)}
    strides = (k.stride(0), k.stride(1), v.stride(0), v.stride(1))
    _store_kv[(num_tokens,)](k, v, *strides, k_pages, v_pages, slots, *scales, heads, **blocks)


@triton.jit(do_not_specialize=["num_requests"], do_not_specialize_on_alignment=["rows", "seq_lens"])
def _list_pages(
    page_table, row_stride, rows, seq_lens, out, num_requests,
    PAGE_SIZE: tl.constexpr, R_BLOCK: tl.constexpr, C_BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    requests = tl.arange(0, R_BLOCK)
    lengths = tl.load(seq_lens + requests, mask=requests < num_requests, other=0)
    num_pages = (lengths + PAGE_SIZE - 1) // PAGE_SIZE
    start = tl.sum(tl.where(requests < request, num_pages, 0))
    own_pages = tl.sum(tl.where(requests == request, num_pages, 0))
    columns = tl.program_id(1) * C_BLOCK + tl.arange(0, C_BLOCK)
    row = tl.load(rows + request).to(tl.int64)
    pages = tl.load(page_table + row * row_stride + columns, mask=columns < own_pages, other=0)
    tl.store(out + start + columns, pages, mask=columns < own_pages)


def list_pages(
    page_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    max_pages: int,
    out: torch.Tensor,
) -> None:
    """Concatenate the pages of all requests (FlashInfer's ``paged_kv_indices``), without a copy between CPU and GPU.

    Args:
        page_table: int32 [R, M].
        rows: page-table row of each request, int32 [B].
        seq_lens: tokens per request, int32 [B].
        page_size: S.
        max_pages: pages of the longest request, known on the CPU.
        out: int32, large enough for all requests' pages.
    """
    num_requests = len(rows)
    grid = (num_requests, triton.cdiv(max_pages, 1024))
    blocks = {"PAGE_SIZE": page_size, "R_BLOCK": triton.next_power_of_2(num_requests), "C_BLOCK": 1024}
    _list_pages[grid](page_table, page_table.stride(0), rows, seq_lens, out, num_requests, **blocks)
