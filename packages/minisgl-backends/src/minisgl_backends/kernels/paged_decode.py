"""Split-KV decode attention over the paged KV pool: one query per request, limited by memory bandwidth.

The key tiles of a batch are split into partitions of equal length, one per program, regardless of request boundaries. So all
programs end together, as in Stream-K GEMMs (arXiv 2301.03598). Softmax is computed online over the tiles (arXiv 2205.14135), to
base 2 as in `minisgl_backends.kernels.paged_prefill`. If a request spans several partitions, the last program to finish merges
its partial outputs by log-sum-exp (Flash-Decoding, pytorch.org/blog/flash-decoding). The G query heads of a KV head share a
tile, so that K and V are read once for all of them.
The KV head is the fastest grid dimension, since the pool stores the heads of a token next to each other.

Shape legend: B requests, Hq and Hkv heads, G = Hq / Hkv, D head dimension, P pages of S tokens, C split-KV partitions.
The page table has R rows and M columns. `minisgl_backends.kernels.head_blocks` explains D_BLOCK and REST.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from minisgl_backends.kernels.decode_tile import DecodeTile
from minisgl_backends.kernels.dot import add_dot
from minisgl_backends.kernels.exp2 import LOG2_E, LOG2_E_IN_KERNELS
from minisgl_backends.kernels.fp8 import to_dot_dtype, unpack_fp8_pairs
from minisgl_backends.kernels.head_blocks import column_mask, head_blocks
from minisgl_backends.kernels.paged_prefill import soft_capped
from minisgl_core.contracts.attention import AttentionLayer
from minisgl_core.utils.fp8 import FP8

_MIN_TILES = 2
"""Smallest partition in tiles; for smaller ones the merge costs more than it gains."""


@triton.jit
def _pages(table, key, stop, PAGE_SIZE: tl.constexpr):
    return tl.load(table + key // PAGE_SIZE, mask=key < stop, other=0).to(tl.int64)


@triton.jit
def _online_softmax(scores, inside, row_max, row_sum, SOFT_CAP: tl.constexpr):
    """Return a tile's softmax weights, the factor that rescales earlier sums, the running maximum and the sum of weights."""
    scores = soft_capped(scores, SOFT_CAP)
    scores = tl.where(inside[None, :], scores, float("-inf"))
    new_row_max = tl.maximum(row_max, tl.max(scores, 1))
    weights, rescale = tl.exp2(scores - new_row_max[:, None]), tl.exp2(row_max - new_row_max)
    return weights, rescale, new_row_max, row_sum * rescale + tl.sum(weights, 1)


@triton.jit
def _attend(
    queries, q_rest, k_pages, v_pages, table, head, heads, begin, end, stop, scale, row_max, row_sum,
    D: tl.constexpr, D_BLOCK: tl.constexpr, REST: tl.constexpr, PAGE_SIZE: tl.constexpr, SOFT_CAP: tl.constexpr,
    G_BLOCK: tl.constexpr, KEYS: tl.constexpr, PAIRS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Attend with queries, [G_BLOCK, D_BLOCK] and [G_BLOCK, REST], to the keys ``[begin, end)`` that lie before `stop`.

    `row_max` and `row_sum` [G_BLOCK] are the initial running maximum and sum of weights: -inf and 0, or an attention sink's.
    Returns the weighted mean of the values, in blocks like the queries, and the log-sum-exp of the scores, to base 2. If REST is
    0, the second block is not used.

    Pages are looked up one tile ahead. For a lookup in the iteration that uses the pages, Triton would take a pipeline stage
    from the loads of K and V.

    Tensor cores need V transposed on the way from shared memory, which the hardware does for 16-bit elements only. So with
    PAIRS, FP8 V is read as pairs of columns, which are unpacked in registers.
    """
    key, dim, pair = begin + tl.arange(0, KEYS), tl.arange(0, D_BLOCK), tl.arange(0, D_BLOCK // 2)
    page = _pages(table, key, stop, PAGE_SIZE)
    if PAIRS:
        even = tl.zeros((G_BLOCK, D_BLOCK // 2), tl.float32)
        odd = tl.zeros((G_BLOCK, D_BLOCK // 2), tl.float32)
        v_pairs = v_pages.to(tl.pointer_type(tl.int16), bitcast=True)
    else:
        total = tl.zeros((G_BLOCK, D_BLOCK), tl.float32)
    if REST > 0:
        dim_rest, total_rest = (D_BLOCK + tl.arange(0, REST))[None, :], tl.zeros((G_BLOCK, REST), tl.float32)
    for _ in range(begin, end, KEYS):
        next_page = _pages(table, key + KEYS, stop, PAGE_SIZE)
        inside, row = (key < stop)[:, None], ((page * PAGE_SIZE + key % PAGE_SIZE) * heads + head)[:, None]
        k = tl.load(k_pages + row * D + dim[None, :], mask=inside, other=0.0).to(queries.dtype)
        scores = add_dot(tl.zeros((G_BLOCK, KEYS), tl.float32), queries, tl.trans(k), WIDEN)
        if REST > 0:
            is_rest = column_mask(inside, D, D_BLOCK, REST)
            k_rest = tl.load(k_pages + row * D + dim_rest, mask=is_rest, other=0.0).to(queries.dtype)
            scores = add_dot(scores, q_rest, tl.trans(k_rest), WIDEN)
        weights, rescale, row_max, row_sum = _online_softmax(scores * scale, key < stop, row_max, row_sum, SOFT_CAP)
        if PAIRS:
            pairs = tl.load(v_pairs + row * (D // 2) + pair[None, :], mask=inside, other=0)
            first, second = unpack_fp8_pairs(pairs)
            weights = weights if WIDEN else weights.to(queries.dtype)
            even = add_dot(even * rescale[:, None], weights, first.to(queries.dtype), WIDEN)
            odd = add_dot(odd * rescale[:, None], weights, second.to(queries.dtype), WIDEN)
        else:
            v = tl.load(v_pages + row * D + dim[None, :], mask=inside, other=0.0).to(queries.dtype)
            total *= rescale[:, None]
            weights = weights if WIDEN else weights.to(v.dtype)
            total = add_dot(total, weights, v, WIDEN)
        if REST > 0:
            v_rest = tl.load(v_pages + row * D + dim_rest, mask=is_rest, other=0.0).to(queries.dtype)
            total_rest = add_dot(total_rest * rescale[:, None], weights, v_rest, WIDEN)
        page, key = next_page, key + KEYS
    if PAIRS:
        total = tl.join(even, odd).reshape(G_BLOCK, D_BLOCK)
    if REST == 0:
        total_rest = total
    return total / row_sum[:, None], total_rest / row_sum[:, None], row_max + tl.log2(row_sum)


@triton.jit
def _merge(
    partials, partial_lse, head, heads, first_partition, last_partition,
    G: tl.constexpr, D: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr, G_BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge BLOCK columns, from FIRST on, of a request's partial outputs; see `SplitKVWorkspace`.

    The partitions are `first_partition` to `last_partition`. Loads bypass the L1 cache, since other SMs wrote what they load.
    """
    member, dim = tl.arange(0, G_BLOCK), FIRST + tl.arange(0, BLOCK)
    mask = column_mask((member < G)[:, None], D, FIRST, BLOCK)
    total = tl.zeros((G_BLOCK, BLOCK), tl.float32)
    row_max = tl.full((G_BLOCK,), float("-inf"), tl.float32)
    row_sum = tl.zeros((G_BLOCK,), tl.float32)
    for partition in tl.range(first_partition, last_partition + 1, loop_unroll_factor=4):
        index = ((2 * partition + (partition == first_partition).to(tl.int32)) * heads + head) * G + member
        lse = tl.load(partial_lse + index, mask=member < G, other=0.0, cache_modifier=".cg")
        values = partials + index[:, None] * D + dim[None, :]
        values = tl.load(values, mask=mask, other=0.0, cache_modifier=".cg")
        new_row_max = tl.maximum(row_max, lse)
        rescale, weight = tl.exp2(row_max - new_row_max), tl.exp2(lse - new_row_max)
        total = total * rescale[:, None] + values * weight[:, None]
        row_max, row_sum = new_row_max, row_sum * rescale + weight
    return total / row_sum[:, None]


@triton.jit(do_not_specialize=["num_requests"], do_not_specialize_on_alignment=["rows", "seq_lens"])
def _decode(
    q, q_stride_t, q_stride_h, k_pages, v_pages, page_table, row_stride, rows, seq_lens, out, partials, partial_lse, arrived,
    sinks, scale, v_scale, num_requests, heads,
    G: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr, REST: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, G_BLOCK: tl.constexpr, KEYS: tl.constexpr, R_BLOCK: tl.constexpr,
    LEAST: tl.constexpr, PAIRS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Attend to the tiles of one partition, request by request, for one KV head.

    The tiles of all requests are numbered. A partition has `size` of them, and this one ends before tile `last`. The current
    request has the tiles from `first` to before `after`.
    """
    head, partition, num_partitions = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    requests = tl.arange(0, R_BLOCK)
    lengths = tl.load(seq_lens + requests, mask=requests < num_requests, other=0)
    if WINDOW > 0:
        lengths = tl.minimum(lengths, WINDOW)
    ends = tl.cumsum(tl.cdiv(lengths, KEYS), 0)
    num_tiles = tl.max(ends, 0)
    size = tl.maximum(tl.cdiv(num_tiles, num_partitions), LEAST)
    tile = partition * size
    last = tl.minimum(tile + size, num_tiles)
    if tile >= last:
        return
    request = tl.sum((ends <= tile).to(tl.int32), 0)
    first = tl.max(tl.where(ends <= tile, ends, 0), 0)  # the request's first tile
    member, dim = tl.arange(0, G_BLOCK), tl.arange(0, D_BLOCK)
    is_head = (member < G)[:, None]
    if REST > 0:
        dim_rest, is_rest = (D_BLOCK + tl.arange(0, REST))[None, :], column_mask(is_head, D, D_BLOCK, REST)
    q_head = head * G + member
    while tile < last:
        stop = tl.load(seq_lens + request)
        table = page_table + tl.load(rows + request).to(tl.int64) * row_stride
        start = 0
        if WINDOW > 0:
            start = tl.maximum(stop - WINDOW, 0)
        after = first + tl.cdiv(stop - start, KEYS)
        until = tl.minimum(after, last)
        q_index = request.to(tl.int64) * q_stride_t + q_head[:, None] * q_stride_h + dim[None, :]
        queries = tl.load(q + q_index, mask=is_head, other=0.0)
        q_rest = queries
        if REST > 0:
            q_index = request.to(tl.int64) * q_stride_t + q_head[:, None] * q_stride_h + dim_rest
            q_rest = tl.load(q + q_index, mask=is_rest, other=0.0)
        queries, q_rest, factor = to_dot_dtype(queries, q_rest, scale, k_pages, REST)
        begin, end = start + (tile - first) * KEYS, start + (until - first) * KEYS
        row_max = tl.full((G_BLOCK,), float("-inf"), tl.float32)
        row_sum = tl.zeros((G_BLOCK,), tl.float32)
        if sinks is not None:  # it counts once per request, in the partition that has the first key
            sink = tl.load(sinks + q_head, mask=member < G, other=0.0).to(tl.float32) * LOG2_E_IN_KERNELS
            row_max = tl.where(tile == first, sink, float("-inf"))
            row_sum += (tile == first).to(tl.float32)
        values, values_rest, lse = _attend(
            queries, q_rest, k_pages, v_pages, table, head, heads, begin, end, stop, factor, row_max, row_sum,
            D, D_BLOCK, REST, PAGE_SIZE, SOFT_CAP, G_BLOCK, KEYS, PAIRS, WIDEN,
        )  # fmt: skip
        values *= v_scale
        values_rest *= v_scale
        is_last = True
        if (tile > first) | (until < after):
            index = ((2 * partition + (tile == first).to(tl.int32)) * heads + head) * G + member
            tl.store(partials + index[:, None] * D + dim[None, :], values, mask=is_head)
            if REST > 0:
                tl.store(partials + index[:, None] * D + dim_rest, values_rest, mask=is_rest)
            tl.store(partial_lse + index, lse, mask=member < G)
            tl.debug_barrier()  # all stores of the program precede its arrival
            counter = arrived + request * heads + head
            first_partition, last_partition = first // size, (after - 1) // size
            is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == last_partition - first_partition
            if is_last:
                tl.store(counter, 0)  # for the next layer
                values = _merge(
                    partials, partial_lse, head, heads, first_partition, last_partition, G, D, 0, D_BLOCK, G_BLOCK
                )
                if REST > 0:
                    values_rest = _merge(
                        partials, partial_lse, head, heads, first_partition, last_partition, G, D, D_BLOCK, REST, G_BLOCK
                    )  # fmt: skip
        if is_last:
            to = (request.to(tl.int64) * heads * G + q_head)[:, None] * D + dim[None, :]
            tl.store(out + to, values.to(out.dtype.element_ty), mask=is_head)
            if REST > 0:
                to = (request.to(tl.int64) * heads * G + q_head)[:, None] * D + dim_rest
                tl.store(out + to, values_rest.to(out.dtype.element_ty), mask=is_rest)
        request += 1
        tile, first = after, after


@dataclass(frozen=True, slots=True)
class SplitKVWorkspace:
    """Partial outputs of the requests that lie in several partitions.

    Attributes:
        partials: partial outputs, float32 [C, 2, Hq, D]. Index 1 is for the request that begins in the partition and goes on
            after it, index 0 for the request that began in an earlier one.
        lse: their log-sum-exps to base 2, float32 [C, 2, Hq].
        arrived: partitions of a request that are done, per KV head, int32 [B, Hkv]; 0 between launches.
    """

    partials: torch.Tensor
    lse: torch.Tensor
    arrived: torch.Tensor

    @classmethod
    def make(
        cls, batch: int, num_q_heads: int, num_kv_heads: int, dim: int, device: torch.device, programs: int
    ) -> "SplitKVWorkspace":
        """Allocate for `batch` requests and a grid of at most `programs` programs."""
        num_partitions = max(programs // num_kv_heads, 1)
        partials = torch.empty(num_partitions, 2, num_q_heads, dim, dtype=torch.float32, device=device)
        lse = torch.empty(partials.shape[:-1], dtype=torch.float32, device=device)
        return cls(partials, lse, torch.zeros(batch, num_kv_heads, dtype=torch.int32, device=device))


def decode(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    workspace: SplitKVWorkspace,
    layer: AttentionLayer,
    max_requests: int,
    tile: DecodeTile,
) -> None:
    """Attend with one query per request to all its tokens.

    Args:
        q: [B, Hq, D], contiguous in the last dimension.
        k_pages: [P, S, Hkv, D], contiguous, of q's dtype or float8_e4m3fn.
        v_pages: like k_pages.
        page_table: int32 [R, M].
        rows: int32 [B].
        seq_lens: int32 [B].
        out: [B, Hq, D], contiguous.
        workspace: made for B requests, and for the programs of `tile`.
        layer: scales, window, soft cap and sinks.
        max_requests: B of the largest batch, for which the kernel is compiled.
        tile: see `decode_tile`.
    """
    num_requests, num_q_heads, dim = q.shape
    heads = k_pages.shape[2]
    group = num_q_heads // heads
    k_scale, v_scale = layer.kv_scales
    is_fp8 = k_pages.dtype == FP8
    # PAIRS is used for the shapes in which it was tested on a GPU, which are those of most models.
    pairs = is_fp8 and q.dtype == torch.bfloat16 and dim == 128 and group <= 16
    d_block, rest = head_blocks(dim, is_fp8=is_fp8)
    _decode[(heads, len(workspace.partials))](
        q, q.stride(0), q.stride(1), k_pages, v_pages, page_table, page_table.stride(0), rows, seq_lens, out,
        workspace.partials, workspace.lse, workspace.arrived, layer.sinks, layer.scale * k_scale * LOG2_E, v_scale,
        num_requests, heads,
        G=group, D=dim, D_BLOCK=d_block, REST=rest, PAGE_SIZE=k_pages.shape[1], WINDOW=layer.sliding_window or 0,
        SOFT_CAP=(layer.soft_cap or 0.0) * LOG2_E, G_BLOCK=max(16, triton.next_power_of_2(group)),
        KEYS=tile.keys, R_BLOCK=triton.next_power_of_2(max_requests), LEAST=_MIN_TILES, PAIRS=pairs,
        WIDEN=not q.is_cuda, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
