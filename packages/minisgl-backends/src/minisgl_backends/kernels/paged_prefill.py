"""Prefill attention over the paged KV pool.

Softmax is computed online over tiles of keys (arXiv 2205.14135). Scores and soft caps are multiplied by log2(e), so that softmax
weights are powers of 2. The G query heads of a KV head share a tile, so that K and V are read once for all of them.

Shape legend: T tokens, B requests, Hq and Hkv heads, G = Hq / Hkv, D head dimension, P pages of S tokens.
The page table has R rows and M columns. `minisgl_backends.kernels.head_blocks` explains D_BLOCK and REST.
"""

import torch
import triton
import triton.language as tl

from minisgl_backends.kernels.dot import add_dot
from minisgl_backends.kernels.exp2 import LOG2_E, LOG2_E_IN_KERNELS
from minisgl_backends.kernels.fp8 import to_dot_dtype
from minisgl_backends.kernels.head_blocks import column_mask, head_blocks
from minisgl_core.contracts.attention import AttentionLayer
from minisgl_core.utils.fp8 import FP8


@triton.jit
def soft_capped(scores, SOFT_CAP: tl.constexpr):
    """Return ``SOFT_CAP * tanh(scores / SOFT_CAP)``, or the scores if SOFT_CAP is 0."""
    if SOFT_CAP > 0:  # tanh(x) = 2 * sigmoid(2 * x) - 1; Triton has no tanh on all of its targets
        scores = SOFT_CAP * (2.0 * tl.sigmoid(scores * (2.0 / SOFT_CAP)) - 1.0)
    return scores


@triton.jit
def _attend_tile(
    q, q_rest, k_pages, v_pages, table, head, heads, start, stop, position, scale, total, total_rest, row_max, row_sum,
    D: tl.constexpr, D_BLOCK: tl.constexpr, REST: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, N_BLOCK: tl.constexpr, MASKED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Attend with q, [rows, D_BLOCK] and [rows, REST], to the tile of keys at `start`; with MASKED, only to visible ones.

    Returns the running sums of weighted values, maximum scores and sums of weights. If REST is 0, `q_rest` is not used, and
    `total_rest` is returned as it is.
    """
    key = start + tl.arange(0, N_BLOCK)
    inside = key < stop
    page = tl.load(table + key // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
    slot = page * PAGE_SIZE + key % PAGE_SIZE
    index = (slot * heads + head)[:, None] * D + tl.arange(0, D_BLOCK)[None, :]
    k = tl.load(k_pages + index, mask=inside[:, None], other=0.0).to(q.dtype)
    scores = add_dot(tl.zeros((q.shape[0], N_BLOCK), tl.float32), q, tl.trans(k), WIDEN)
    if REST > 0:
        index_rest = (slot * heads + head)[:, None] * D + (D_BLOCK + tl.arange(0, REST))[None, :]
        is_rest = column_mask(inside[:, None], D, D_BLOCK, REST)
        k_rest = tl.load(k_pages + index_rest, mask=is_rest, other=0.0).to(q.dtype)
        scores = add_dot(scores, q_rest, tl.trans(k_rest), WIDEN)
    scores = soft_capped(scores * scale, SOFT_CAP)
    if MASKED:
        visible = inside[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    new_row_max = tl.maximum(row_max, tl.max(scores, 1))
    base = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)  # -inf while a row has no visible key
    weights = tl.exp2(scores - base[:, None])
    rescale = tl.exp2(row_max - base)
    v = tl.load(v_pages + index, mask=inside[:, None], other=0.0).to(q.dtype)
    total *= rescale[:, None]
    dot_weights = weights if WIDEN else weights.to(v.dtype)
    total = add_dot(total, dot_weights, v, WIDEN)
    if REST > 0:
        v_rest = tl.load(v_pages + index_rest, mask=is_rest, other=0.0).to(q.dtype)
        total_rest = add_dot(total_rest * rescale[:, None], dot_weights, v_rest, WIDEN)
    return total, total_rest, new_row_max, row_sum * rescale + tl.sum(weights, 1)


@triton.jit(do_not_specialize_on_alignment=["rows", "cu_seqlens_q", "seq_lens"])
def _prefill(
    q, q_stride_t, q_stride_h, k_pages, v_pages, page_table, row_stride, rows, cu_seqlens_q, seq_lens, tiles, out,
    sinks, scale, v_scale, heads,
    G: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr, REST: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, M_BLOCK: tl.constexpr, N_BLOCK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """A tile holds M_BLOCK (query, head of the group) pairs of a request; the head varies fastest."""
    request, first_pair = tl.load(tiles + 2 * tl.program_id(0)), tl.load(tiles + 2 * tl.program_id(0) + 1)
    head = tl.program_id(1)
    begin = tl.load(cu_seqlens_q + request)
    num_queries = tl.load(cu_seqlens_q + request + 1) - begin
    cached = tl.load(seq_lens + request) - num_queries
    table = page_table + tl.load(rows + request).to(tl.int64) * row_stride
    pair, dim = first_pair + tl.arange(0, M_BLOCK), tl.arange(0, D_BLOCK)
    query, q_head = pair // G, head * G + pair % G
    is_query = (query < num_queries)[:, None]
    token = (begin + query).to(tl.int64)
    queries = tl.load(q + (token * q_stride_t + q_head * q_stride_h)[:, None] + dim[None, :], mask=is_query, other=0.0)
    q_rest = queries
    if REST > 0:
        dim_rest, is_rest = (D_BLOCK + tl.arange(0, REST))[None, :], column_mask(is_query, D, D_BLOCK, REST)
        q_rest = tl.load(q + (token * q_stride_t + q_head * q_stride_h)[:, None] + dim_rest, mask=is_rest, other=0.0)
    queries, q_rest, scale = to_dot_dtype(queries, q_rest, scale, k_pages, REST)
    total = tl.zeros((M_BLOCK, D_BLOCK), tl.float32)
    total_rest = tl.zeros((M_BLOCK, REST if REST > 0 else 1), tl.float32)
    row_max = tl.full((M_BLOCK,), float("-inf"), tl.float32)
    row_sum = tl.zeros((M_BLOCK,), tl.float32)
    if sinks is not None:  # as if each row had seen a key with this score and no value
        row_max = tl.load(sinks + q_head).to(tl.float32) * LOG2_E_IN_KERNELS
        row_sum = tl.full((M_BLOCK,), 1.0, tl.float32)
    position = cached + query
    earliest = cached + first_pair // G
    stop = cached + tl.minimum((first_pair + M_BLOCK - 1) // G + 1, num_queries)
    if WINDOW > 0:
        start = tl.maximum(earliest - WINDOW + 1, 0) // N_BLOCK * N_BLOCK
        masked_from = start
    else:
        start = 0
        masked_from = (earliest + 1) // N_BLOCK * N_BLOCK  # keys before it are visible to the whole tile
    for key in range(start, masked_from, N_BLOCK):
        total, total_rest, row_max, row_sum = _attend_tile(
            queries, q_rest, k_pages, v_pages, table, head, heads, key, stop, position, scale, total, total_rest, row_max,
            row_sum, D, D_BLOCK, REST, PAGE_SIZE, WINDOW, SOFT_CAP, N_BLOCK, False, WIDEN,
        )  # fmt: skip
    for key in range(masked_from, stop, N_BLOCK):
        total, total_rest, row_max, row_sum = _attend_tile(
            queries, q_rest, k_pages, v_pages, table, head, heads, key, stop, position, scale, total, total_rest, row_max,
            row_sum, D, D_BLOCK, REST, PAGE_SIZE, WINDOW, SOFT_CAP, N_BLOCK, True, WIDEN,
        )  # fmt: skip
    total = total * v_scale / tl.maximum(row_sum, 1.0)[:, None]  # row_sum is at least 1, except in padding rows
    to = (token * heads * G + q_head)[:, None] * D + dim[None, :]
    tl.store(out + to, total.to(out.dtype.element_ty), mask=is_query)
    if REST > 0:
        total_rest = total_rest * v_scale / tl.maximum(row_sum, 1.0)[:, None]
        to = (token * heads * G + q_head)[:, None] * D + dim_rest
        tl.store(out + to, total_rest.to(out.dtype.element_ty), mask=is_rest)


def prefill_tile(dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the (query, head) pairs and the keys of a tile of `prefill`.

    A tile fits into 99 KB of shared memory, which every GPU since Ampere has.
    """
    is_wide, is_float32 = dim > 128, dtype == torch.float32
    if is_wide and is_float32:
        return 32, 16
    return (64, 32) if is_wide or is_float32 else (128, 64)


def prefill(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    layer: AttentionLayer,
) -> None:
    """Attend causally with each request's last tokens to all its tokens.

    Args:
        q: [T, Hq, D], contiguous in the last dimension.
        k_pages: [P, S, Hkv, D], contiguous, of q's dtype or float8_e4m3fn.
        v_pages: like k_pages.
        page_table: int32 [R, M].
        rows: int32 [B].
        cu_seqlens_q: cumulative query counts, int32 [B + 1].
        seq_lens: int32 [B].
        tiles: request and first (query, head of the group) pair of each tile, int32 [tiles, 2].
        out: [T, Hq, D], contiguous.
        layer: scales, window, soft cap and sinks.
    """
    num_q_heads, dim = q.shape[1:]
    heads = k_pages.shape[2]
    pairs, keys = prefill_tile(dim, q.dtype)
    d_block, rest = head_blocks(dim, is_fp8=k_pages.dtype == FP8)
    k_scale, v_scale = layer.kv_scales
    _prefill[(len(tiles), heads)](
        q, q.stride(0), q.stride(1), k_pages, v_pages, page_table, page_table.stride(0), rows, cu_seqlens_q, seq_lens,
        tiles, out, layer.sinks, layer.scale * k_scale * LOG2_E, v_scale, heads,
        G=num_q_heads // heads, D=dim, D_BLOCK=d_block, REST=rest, PAGE_SIZE=k_pages.shape[1],
        WINDOW=layer.sliding_window or 0,
        SOFT_CAP=(layer.soft_cap or 0.0) * LOG2_E, M_BLOCK=pairs, N_BLOCK=keys, WIDEN=not q.is_cuda,
        num_warps=8 if pairs == 128 and dim > 64 else 4, num_stages=2,
    )  # fmt: skip
