"""Attention over the paged KV pool: decode with split keys, and prefill.

Softmax runs over tiles of keys as they come (arXiv 2205.14135). A decode has one query, so its keys are split over several
programs whose results are merged by their log-sum-exps (Flash-Decoding, pytorch.org/blog/flash-decoding), by whichever of them
ends last. The G query heads of a KV head share a tile, so that K and V are read once for all of them.

Shape legend: T tokens, B requests, Hq and Hkv heads, G = Hq / Hkv, D head dimension, P pages of S tokens, R rows and M
columns of the page table, N splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from minisgl_backends.kernels.device import has_large_shared_memory
from minisgl_backends.kernels.fp8 import as_multiplied, halves_of_pairs
from minisgl_core.contracts.attention import AttentionLayer

LOG2_E = 1.4426950408889634
MIN_SPLIT = 256
"""Fewest keys that are worth a program of their own."""


@triton.jit
def _dot(a, b, WIDEN: tl.constexpr):
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")  # float32 means float32, not TF32


@triton.jit
def _place(table, head, heads, start, stop, PAGE_SIZE: tl.constexpr, N_BLOCK: tl.constexpr):
    """(Keys from `start`, whether each is before `stop`, row of the pool that each has for this head)."""
    key = start + tl.arange(0, N_BLOCK)
    inside = key < stop
    page = tl.load(table + key // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
    return key, inside, (page * PAGE_SIZE + key % PAGE_SIZE) * heads + head


@triton.jit
def _weigh(
    q, k, key, inside, position, scale, top, norm,
    WINDOW: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """(Weights of a tile's keys, what is kept of what was summed up before, running largest score, sum of weights)."""
    scores = _dot(q, tl.trans(k), WIDEN) * scale
    if MASKED:
        visible = inside[None, :]
        if CAUSAL:
            visible = visible & (key[None, :] <= position[:, None])
            if WINDOW > 0:
                visible = visible & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # where a row has seen no key yet
    weights = tl.exp2(scores - base[:, None])
    kept = tl.exp2(top - base)
    return weights, kept, new_top, norm * kept + tl.sum(weights, 1)


@triton.jit
def _attend_tile(
    q, k_pages, v_pages, table, head, heads, start, stop, position, scale, total, top, norm,
    D: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, N_BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Let q [rows, D] attend to keys from `start`; returns the running (weighted values, largest score, sum of weights)."""
    key, inside, row = _place(table, head, heads, start, stop, PAGE_SIZE, N_BLOCK)
    place = row[:, None] * D + tl.arange(0, D)[None, :]
    k = tl.load(k_pages + place, mask=inside[:, None], other=0.0).to(q.dtype)
    weights, kept, top, norm = _weigh(q, k, key, inside, position, scale, top, norm, WINDOW, CAUSAL, MASKED, WIDEN)
    v = tl.load(v_pages + place, mask=inside[:, None], other=0.0).to(q.dtype)
    weighted = _dot(weights if WIDEN else weights.to(v.dtype), v, WIDEN)
    return total * kept[:, None] + weighted, top, norm


@triton.jit
def _attend_tile_of_pairs(
    q, k_pages, v_pairs, table, head, heads, start, stop, scale, even, odd, top, norm,
    D: tl.constexpr, PAGE_SIZE: tl.constexpr, N_BLOCK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """`_attend_tile` of a decode over an fp8 pool, with the weighted values of even and of odd columns apart.

    Tensor cores take V with its rows and columns exchanged on the way from shared memory, which processors do to elements of 16
    bits. So V is read as pairs of columns, and taken apart in registers.
    """
    key, inside, row = _place(table, head, heads, start, stop, PAGE_SIZE, N_BLOCK)
    place = row[:, None] * D + tl.arange(0, D)[None, :]
    k = tl.load(k_pages + place, mask=inside[:, None], other=0.0).to(q.dtype)
    weights, kept, top, norm = _weigh(q, k, key, inside, key, scale, top, norm, 0, False, True, WIDEN)
    place = row[:, None] * (D // 2) + tl.arange(0, D // 2)[None, :]
    first, second = halves_of_pairs(tl.load(v_pairs + place, mask=inside[:, None], other=0))
    weights = weights if WIDEN else weights.to(q.dtype)
    even = even * kept[:, None] + _dot(weights, first.to(q.dtype), WIDEN)
    return even, odd * kept[:, None] + _dot(weights, second.to(q.dtype), WIDEN), top, norm


@triton.jit
def _splits(
    seq_lens, request, num_requests, num_splits, heads, most_programs,
    WINDOW: tl.constexpr, N_BLOCK: tl.constexpr, R_BLOCK: tl.constexpr, MIN_SPLIT: tl.constexpr,
):  # fmt: skip
    """Returns (first key, end of keys, keys a split) of a request.

    The splits of a batch are about as long as each other, however long the requests are.
    """
    everyone = tl.arange(0, R_BLOCK)
    lengths = tl.load(seq_lens + everyone, mask=everyone < num_requests, other=0)
    stop = tl.load(seq_lens + request)
    start = 0
    if WINDOW > 0:
        lengths = tl.minimum(lengths, WINDOW)
        start = tl.maximum(stop - WINDOW, 0)
    even = tl.cdiv(tl.sum(lengths), most_programs) * heads
    split = tl.maximum(tl.maximum(even, MIN_SPLIT), tl.cdiv(stop - start, num_splits))
    return start, stop, tl.cdiv(split, N_BLOCK) * N_BLOCK


@triton.jit(do_not_specialize=["num_requests", "num_splits"])
def _decode(
    q, q_stride_t, q_stride_h, k_pages, v_pages, page_table, row_stride, rows, seq_lens, out, part, part_lse, arrived,
    scale, v_scale, num_requests, num_splits, heads, most_programs,
    G: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, G_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr, R_BLOCK: tl.constexpr, MIN_SPLIT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    request, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, stop, split_len = _splits(
        seq_lens, request, num_requests, num_splits, heads, most_programs, WINDOW, N_BLOCK, R_BLOCK, MIN_SPLIT
    )
    start = first + split * split_len
    if start >= stop:
        return
    table = page_table + tl.load(rows + request).to(tl.int64) * row_stride
    member, dim = tl.arange(0, G_BLOCK), tl.arange(0, D)
    real = (member < G)[:, None]
    q_head = head * G + member
    q_place = request.to(tl.int64) * q_stride_t + q_head[:, None] * q_stride_h + dim[None, :]
    queries, scale = as_multiplied(tl.load(q + q_place, mask=real, other=0.0), scale, k_pages)
    top = tl.full((G_BLOCK,), float("-inf"), tl.float32)
    norm = tl.zeros((G_BLOCK,), tl.float32)
    end = tl.minimum(start + split_len, stop)
    if v_pages.dtype.element_ty == tl.float8e4nv:
        even = tl.zeros((G_BLOCK, D // 2), tl.float32)
        odd = tl.zeros((G_BLOCK, D // 2), tl.float32)
        v_pairs = v_pages.to(tl.pointer_type(tl.int16), bitcast=True)
        for key in range(start, end, N_BLOCK):
            even, odd, top, norm = _attend_tile_of_pairs(
                queries, k_pages, v_pairs, table, head, heads, key, end, scale, even, odd, top, norm,
                D, PAGE_SIZE, N_BLOCK, WIDEN,
            )  # fmt: skip
        total = tl.join(even, odd).reshape(G_BLOCK, D)
    else:
        total = tl.zeros((G_BLOCK, D), tl.float32)
        for key in range(start, end, N_BLOCK):
            total, top, norm = _attend_tile(
                queries, k_pages, v_pages, table, head, heads, key, end, member, scale, total, top, norm,
                D, PAGE_SIZE, WINDOW, N_BLOCK, False, True, WIDEN,
            )  # fmt: skip
    total = total * v_scale / norm[:, None]
    heads_before = request.to(tl.int64) * heads * G + q_head
    used = tl.cdiv(stop - first, split_len)
    if used > 1:
        place = heads_before * num_splits + split
        tl.store(part + place[:, None] * D + dim[None, :], total, mask=real)
        tl.store(part_lse + place, top + tl.log2(norm), mask=member < G)
        tl.debug_barrier()  # all of the program's stores come before its arrival
        counter = arrived + request * heads + head
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") != used - 1:
            return
        tl.store(counter, 0)  # for the next layer
        total = _merge(part, part_lse, heads_before, num_splits, used, G, D, G_BLOCK)
    tl.store(out + heads_before[:, None] * D + dim[None, :], total.to(out.dtype.element_ty), mask=real)


@triton.jit
def _merge(part, part_lse, heads_before, num_splits, used, G: tl.constexpr, D: tl.constexpr, G_BLOCK: tl.constexpr):
    """All splits' results of a group of heads, weighted; read past the L1 cache, as other processors wrote them."""
    member, dim = tl.arange(0, G_BLOCK), tl.arange(0, D)
    total = tl.zeros((G_BLOCK, D), tl.float32)
    top = tl.full((G_BLOCK,), float("-inf"), tl.float32)
    norm = tl.zeros((G_BLOCK,), tl.float32)
    for split in range(used):
        place = heads_before * num_splits + split
        lse = tl.load(part_lse + place, mask=member < G, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, lse)
        kept, weight = tl.exp2(top - new_top), tl.exp2(lse - new_top)
        values = part + place[:, None] * D + dim[None, :]
        values = tl.load(values, mask=(member < G)[:, None], other=0.0, cache_modifier=".cg")
        total = total * kept[:, None] + values * weight[:, None]
        top, norm = new_top, norm * kept + weight
    return total / norm[:, None]


@triton.jit
def _prefill(
    q, q_stride_t, q_stride_h, k_pages, v_pages, page_table, row_stride, rows, cu_seqlens_q, seq_lens, tiles, out,
    scale, v_scale, heads,
    G: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    M_BLOCK: tl.constexpr, N_BLOCK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """A tile holds M_BLOCK of a request's pairs of query and head of the group, heads fastest."""
    request, first_pair = tl.load(tiles + 2 * tl.program_id(0)), tl.load(tiles + 2 * tl.program_id(0) + 1)
    head = tl.program_id(1)
    begin = tl.load(cu_seqlens_q + request)
    num_queries = tl.load(cu_seqlens_q + request + 1) - begin
    cached = tl.load(seq_lens + request) - num_queries
    table = page_table + tl.load(rows + request).to(tl.int64) * row_stride
    pair, dim = first_pair + tl.arange(0, M_BLOCK), tl.arange(0, D)
    query, q_head = pair // G, head * G + pair % G
    real = (query < num_queries)[:, None]
    token = (begin + query).to(tl.int64)
    queries = tl.load(q + (token * q_stride_t + q_head * q_stride_h)[:, None] + dim[None, :], mask=real, other=0.0)
    queries, scale = as_multiplied(queries, scale, k_pages)
    total = tl.zeros((M_BLOCK, D), tl.float32)
    top = tl.full((M_BLOCK,), float("-inf"), tl.float32)
    norm = tl.zeros((M_BLOCK,), tl.float32)
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
        total, top, norm = _attend_tile(
            queries, k_pages, v_pages, table, head, heads, key, stop, position, scale, total, top, norm,
            D, PAGE_SIZE, WINDOW, N_BLOCK, True, False, WIDEN,
        )  # fmt: skip
    for key in range(masked_from, stop, N_BLOCK):
        total, top, norm = _attend_tile(
            queries, k_pages, v_pages, table, head, heads, key, stop, position, scale, total, top, norm,
            D, PAGE_SIZE, WINDOW, N_BLOCK, True, True, WIDEN,
        )  # fmt: skip
    total = total * v_scale / tl.maximum(norm, 1.0)[:, None]  # 1 at least, but in rows that are padding
    place = (token * heads * G + q_head)[:, None] * D + dim[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=real)


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """Where splits leave their results.

    Attributes:
        part: float32 [B, Hq, N, D].
        lse: float32 [B, Hq, N], to base 2.
        arrived: how many of a head's splits are done, int32 [B, Hkv]; 0 between launches.
        most_programs: how many programs a batch is split into, about.
    """

    part: torch.Tensor
    lse: torch.Tensor
    arrived: torch.Tensor
    most_programs: int

    @classmethod
    def make(
        cls, batch: int, num_q_heads: int, num_kv_heads: int, dim: int, longest: int, device: torch.device
    ) -> DecodeScratch:
        """For B requests, none of more than `longest` tokens."""
        processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
        most_programs = 8 * processors
        wanted = max(8, triton.cdiv(most_programs, batch * num_kv_heads))
        num_splits = min(triton.cdiv(longest, MIN_SPLIT), wanted)
        part = torch.empty(batch, num_q_heads, num_splits, dim, dtype=torch.float32, device=device)
        lse = torch.empty(part.shape[:-1], dtype=torch.float32, device=device)
        arrived = torch.zeros(batch, num_kv_heads, dtype=torch.int32, device=device)
        return cls(part, lse, arrived, most_programs)


def decode(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    scratch: DecodeScratch,
    layer: AttentionLayer,
    most_requests: int,
) -> None:
    """Attention of one query a request to all its tokens.

    Args:
        q: [B, Hq, D], any strides but the last.
        k_pages: [P, S, Hkv, D], contiguous, of q's dtype or float8_e4m3fn.
        v_pages: like k_pages.
        page_table: int32 [R, M].
        rows: int32 [B].
        seq_lens: int32 [B].
        out: [B, Hq, D], contiguous.
        scratch: made for B requests at least as long.
        layer: its scales and window.
        most_requests: B of the largest batch; kernels are compiled for it.
    """
    num_requests, num_q_heads, dim = q.shape
    heads = k_pages.shape[2]
    num_splits = scratch.part.shape[2]
    group = num_q_heads // heads
    k_scale, v_scale = layer.kv_scales
    _decode[(num_requests, heads, num_splits)](
        q, q.stride(0), q.stride(1), k_pages, v_pages, page_table, page_table.stride(0), rows, seq_lens, out,
        scratch.part, scratch.lse, scratch.arrived, layer.scale * k_scale * LOG2_E, v_scale, num_requests, num_splits, heads,
        scratch.most_programs,
        G=group, D=dim, PAGE_SIZE=k_pages.shape[1], WINDOW=layer.sliding_window or 0,
        G_BLOCK=max(16, triton.next_power_of_2(group)), N_BLOCK=_decode_keys(q),
        R_BLOCK=triton.next_power_of_2(most_requests), MIN_SPLIT=MIN_SPLIT, WIDEN=not q.is_cuda, num_warps=4, num_stages=3,
    )  # fmt: skip


def _decode_keys(q: torch.Tensor) -> int:
    """Keys a step takes; three steps' K and V are in a processor's shared memory at once."""
    dim = q.shape[-1]
    if dim > 128:
        return 32
    return 128 if q.element_size() == 2 and has_large_shared_memory(q.device) else 64


def prefill_tile_size(dim: int, dtype: torch.dtype) -> int:
    """Pairs of query and head that `prefill` computes at once."""
    return 64 if dim > 128 or dtype == torch.float32 else 128


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
    """Causal attention of each request's last tokens to all its tokens.

    Args:
        q: [T, Hq, D], any strides but the last.
        k_pages: [P, S, Hkv, D], contiguous, of q's dtype or float8_e4m3fn.
        v_pages: like k_pages.
        page_table: int32 [R, M].
        rows: int32 [B].
        cu_seqlens_q: int32 [B + 1], into q.
        seq_lens: int32 [B].
        tiles: (request, first of its ``queries * G`` pairs) of every tile, int32 [tiles, 2].
        out: [T, Hq, D], contiguous.
        layer: its scales and window.
    """
    num_q_heads, dim = q.shape[1:]
    heads = k_pages.shape[2]
    tile = prefill_tile_size(dim, q.dtype)
    k_scale, v_scale = layer.kv_scales
    _prefill[(len(tiles), heads)](
        q, q.stride(0), q.stride(1), k_pages, v_pages, page_table, page_table.stride(0), rows, cu_seqlens_q, seq_lens,
        tiles, out, layer.scale * k_scale * LOG2_E, v_scale, heads,
        G=num_q_heads // heads, D=dim, PAGE_SIZE=k_pages.shape[1], WINDOW=layer.sliding_window or 0, M_BLOCK=tile,
        N_BLOCK=32 if dim > 128 or q.dtype == torch.float32 else 64, WIDEN=not q.is_cuda,
        num_warps=8 if tile == 128 and dim == 128 else 4, num_stages=2,
    )  # fmt: skip
