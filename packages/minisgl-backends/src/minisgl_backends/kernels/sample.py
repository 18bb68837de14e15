"""Sampling in two passes over the logits, without a sort and without a probability tensor.

Shape legend: N requests, V vocabulary, C chunks of `BLOCK` tokens. Over several ranks, each rank has C of all A chunks.

The first pass reduces each chunk to its largest logit and the index of that (greedy requests) or the sum of exponentials
(sampled requests). From the sums, the second pass finds the chunk in which the cumulative distribution crosses the target: a
uniform random number times the total. It reads that chunk again to find the token. With a vocabulary-parallel LM head, the
ranks all-reduce the statistics of the first pass. Then they all-reduce the tokens, to which only the rank that owns the chunk
contributes.
"""

import torch
import triton
import triton.language as tl

from minisgl_backends.kernels.exp2 import LOG2_E_IN_KERNELS
from minisgl_core.contracts.ops import VocabShard

BLOCK = 4096


@triton.jit(do_not_specialize=["begin"], do_not_specialize_on_alignment=["temperature", "largest", "argmax", "sums"])
def _reduce(logits, temperature, largest, argmax, sums, V, A, stride, begin, BLOCK: tl.constexpr):
    """Reduce a chunk. V counts this rank's columns without padding, `begin` is its first token; statistics are [N, A]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    t = tl.load(temperature + row)
    values = tl.load(logits + row * stride + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
    # NaN counts as the largest, as in torch. It is not equal to itself, and the index of the largest would be out of bounds.
    values = tl.where(values == values, values, float("inf"))
    top = tl.max(values, 0)
    tl.store(largest + row * A + chunk, top)
    if t > 0:
        scale = LOG2_E_IN_KERNELS / t
        safe = tl.where(top == float("-inf"), 0.0, top)
        tl.store(sums + row * A + chunk, tl.sum(tl.exp2((values - safe) * scale), 0))
    else:
        tokens = begin + tl.min(tl.where(values == top, columns, V), 0)
        tl.store(argmax + row * A + chunk, tokens.to(argmax.dtype.element_ty))


@triton.jit(
    do_not_specialize=["first_chunk", "begin"],
    do_not_specialize_on_alignment=["temperature", "uniform", "argmax", "sums"],
)
def _find(
    logits, temperature, uniform, largest, argmax, sums, out, V, C, A, stride, first_chunk, begin,
    BLOCK: tl.constexpr, A_BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the token if this rank owns its chunk, else 0; this rank owns chunks ``[first_chunk, first_chunk + C)``."""
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, A_BLOCK)
    in_range = chunks < A
    t = tl.load(temperature + row)
    scale = tl.where(t > 0, 1.0 / t, 1.0)
    tops = tl.load(largest + row * A + chunks, mask=in_range, other=float("-inf"))
    top = tl.max(tops, 0)
    if t <= 0:
        is_top = in_range & (tops == top)
        chunk = tl.min(tl.where(is_top, chunks, A_BLOCK), 0)
        argmaxes = tl.load(argmax + row * A + chunks, mask=chunks == chunk, other=0).to(tl.int64)
        is_own = (chunk >= first_chunk) & (chunk < first_chunk + C)
        tl.store(out + row, tl.where(is_own, tl.sum(argmaxes, 0), 0).to(out.dtype.element_ty))
    else:
        mass = tl.load(sums + row * A + chunks, mask=in_range, other=0.0) * tl.exp((tops - top) * scale)
        mass = tl.where(tops == float("-inf"), 0.0, mass)
        cumulative = tl.cumsum(mass, 0)
        target = tl.load(uniform + row) * tl.sum(mass, 0)
        # The first chunk that crosses the target or, if none does because of rounding, the last chunk with probability mass.
        last = tl.max(tl.where(mass > 0, chunks, 0), 0)
        chunk = tl.minimum(tl.min(tl.where((cumulative > target) & (mass > 0), chunks, A_BLOCK), 0), last)
        before = tl.sum(tl.where(chunks < chunk, mass, 0.0), 0)
        is_own = (chunk >= first_chunk) & (chunk < first_chunk + C)
        columns = (chunk - first_chunk) * BLOCK + tl.arange(0, BLOCK)
        mask = is_own & (columns < V)
        values = tl.load(logits + row * stride + columns, mask=mask, other=float("-inf")).to(tl.float32)
        weights = tl.exp((values - top) * scale)
        inside = tl.cumsum(weights, 0)
        crossing = (inside > target - before) & (weights > 0)
        token = tl.min(tl.where(crossing, columns, V), 0)
        fallback = tl.max(tl.where(weights > 0, columns, 0), 0)
        tokens = begin + tl.where(token < V, token, fallback)
        tl.store(out + row, tl.where(is_own, tokens, 0).to(out.dtype.element_ty))


def sample(logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """See `minisgl_core.contracts.ops.SamplingOps.sample`; rows of `logits` are contiguous."""
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, BLOCK)
    largest = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    sums, argmax = torch.empty_like(largest), torch.empty_like(largest, dtype=torch.int32)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        sizes = vocab_size, num_chunks, logits.stride(0)
        _reduce[(num_rows, num_chunks)](logits, temperature, largest, argmax, sums, *sizes, 0, BLOCK=BLOCK, num_warps=4)
        _find[(num_rows,)](
            logits, temperature, uniform, largest, argmax, sums, out, vocab_size, num_chunks, *sizes[1:], 0, 0,
            BLOCK=BLOCK, A_BLOCK=triton.next_power_of_2(num_chunks), num_warps=8,
        )  # fmt: skip
    return out


def sample_shard(
    logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor, shard: VocabShard
) -> torch.Tensor:
    """See `minisgl_core.contracts.ops.SamplingOps.sample_shard`; rows of `logits` are contiguous.

    The ranks exchange their results by all-reduces in which all but one rank add zeros, since communicators have low latency
    for small all-reduces.
    """
    (num_rows, size), group = logits.shape, shard.communicator
    num_chunks, begin = triton.cdiv(size, BLOCK), group.rank * size
    num_all, first_chunk, num_real = num_chunks * group.size, num_chunks * group.rank, shard.vocab_size - begin
    sizes = max(min(num_real, size), 0), logits.stride(0)
    # Tokens are all-reduced in float32, which holds integers up to 2 ** 24 exactly. Rows are padded, since some communicators
    # need multiples of 16 bytes.
    statistics = torch.zeros(3, -(-num_rows // 4) * 4, num_all, dtype=torch.float32, device=logits.device)
    tokens = torch.zeros(statistics.shape[1], dtype=torch.float32, device=logits.device)
    if num_rows:
        largest, argmax, sums = (each[:, first_chunk:] for each in statistics.unbind(0))
        _reduce[(num_rows, num_chunks)](
            logits, temperature, largest, argmax, sums, sizes[0], num_all, sizes[1], begin, BLOCK=BLOCK, num_warps=4
        )
        statistics = group.all_reduce(statistics)
        _find[(num_rows,)](
            logits, temperature, uniform, *statistics.unbind(0), tokens, sizes[0], num_chunks, num_all, sizes[1],
            first_chunk, begin, BLOCK=BLOCK, A_BLOCK=triton.next_power_of_2(num_all), num_warps=8,
        )  # fmt: skip
        tokens = group.all_reduce(tokens)
    return tokens[:num_rows].long()
