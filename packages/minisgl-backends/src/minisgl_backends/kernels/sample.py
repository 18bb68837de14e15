"""Sampling in two passes over the logits, without a sort and without a probability tensor.

Shape legend: N requests, V vocabulary, C chunks of `BLOCK` tokens.

The first pass reduces each chunk to its largest logit, and where that is, or, for random requests, its sum of exponentials. The
second finds, from the C sums, the chunk in which the cumulative distribution crosses the target, and reads that chunk again to
find the token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize_on_alignment=["temperature"])
def _reduce(logits, temperature, largest, place, sums, V, C, stride, BLOCK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    t = tl.load(temperature + row)
    values = tl.load(logits + row * stride + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
    # As torch has it, NaN is the largest; it equals nothing, and a row without a largest logit would lead outside.
    values = tl.where(values == values, values, float("inf"))
    top = tl.max(values, 0)
    tl.store(largest + row * C + chunk, top)
    if t > 0:
        scale = LOG2_E / t
        safe = tl.where(top == float("-inf"), 0.0, top)
        tl.store(sums + row * C + chunk, tl.sum(tl.exp2((values - safe) * scale), 0))
    else:
        tl.store(place + row * C + chunk, tl.min(tl.where(values == top, columns, V), 0))


@triton.jit(do_not_specialize_on_alignment=["temperature", "uniform"])
def _find(
    logits, temperature, uniform, largest, place, sums, out, V, C, stride, BLOCK: tl.constexpr, C_BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, C_BLOCK)
    in_range = chunks < C
    t = tl.load(temperature + row)
    scale = tl.where(t > 0, 1.0 / t, 1.0)
    tops = tl.load(largest + row * C + chunks, mask=in_range, other=float("-inf"))
    top = tl.max(tops, 0)
    if t <= 0:
        places = tl.load(place + row * C + chunks, mask=in_range, other=V)
        tl.store(out + row, tl.min(tl.where(tops == top, places, V), 0).to(tl.int64))
    else:
        mass = tl.load(sums + row * C + chunks, mask=in_range, other=0.0) * tl.exp((tops - top) * scale)
        mass = tl.where(tops == float("-inf"), 0.0, mass)
        cumulative = tl.cumsum(mass, 0)
        target = tl.load(uniform + row) * tl.sum(mass, 0)
        # The first chunk that crosses the target, or, where rounding lets none, the last with any mass.
        last = tl.max(tl.where(mass > 0, chunks, 0), 0)
        chunk = tl.minimum(tl.min(tl.where((cumulative > target) & (mass > 0), chunks, C_BLOCK), 0), last)
        before = tl.sum(tl.where(chunks < chunk, mass, 0.0), 0)
        columns = chunk * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(logits + row * stride + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
        weights = tl.exp((values - top) * scale)
        inside = tl.cumsum(weights, 0)
        crossing = (inside > target - before) & (weights > 0)
        token = tl.min(tl.where(crossing, columns, V), 0)
        fallback = tl.max(tl.where(weights > 0, columns, 0), 0)
        tl.store(out + row, tl.where(token < V, token, fallback).to(tl.int64))


def sample(logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """See `minisgl_core.contracts.ops.Ops.sample`; rows of `logits` are contiguous."""
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, BLOCK)
    largest = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    sums, place = torch.empty_like(largest), torch.empty_like(largest, dtype=torch.int32)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        stride = logits.stride(0)
        _reduce[(num_rows, num_chunks)](
            logits, temperature, largest, place, sums, vocab_size, num_chunks, stride, BLOCK=BLOCK, num_warps=4
        )
        _find[(num_rows,)](
            logits, temperature, uniform, largest, place, sums, out, vocab_size, num_chunks, stride,
            BLOCK=BLOCK, C_BLOCK=triton.next_power_of_2(num_chunks), num_warps=8,
        )  # fmt: skip
    return out
