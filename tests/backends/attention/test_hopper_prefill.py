"""Prefill attention in CUDA C++: compilation, and on a Hopper GPU its results."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compile_cuda import compile_by_nvcc
from hopper_reference import HAS_HOPPER

from minisgl_backends.attention.hopper_backend import HopperAttention
from minisgl_backends.cuda.prefill import Variant
from minisgl_core.contracts.attention import AttentionBatch, AttentionLayer, AttentionSpec
from minisgl_core.contracts.kv_cache import KVPoolSpec
from minisgl_core.kv.pool import KVPool
from minisgl_core.testing.attention_rig import TOLERANCES
from minisgl_core.utils.fp8 import FP8


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize(
    ("group", "dim", "page_size", "is_fp8", "has_extras"),
    [
        pytest.param(*shape, *options, marks=() if (place + number) % 4 == 0 else pytest.mark.nightly)
        for place, shape in enumerate([(5, 128, 64), (1, 64, 8), (8, 128, 256)])
        for number, options in enumerate([(False, False), (True, False), (False, True), (True, True)])
    ],
)
def test_variants_compile_without_spilling_or_serialization(
    group: int, dim: int, page_size: int, is_fp8: bool, has_extras: bool, tmp_path: Path
) -> None:
    log = compile_by_nvcc(Variant(group, dim, page_size, is_fp8, has_extras).source(), tmp_path)
    assert "0 bytes spill stores" in log
    assert "serialized" not in log


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("page_size", [8, 16, 64, 256])
@pytest.mark.parametrize("group", [1, 2, 5, 8])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("longest", [9, 300, 2100])
def test_mixed_lengths_match_a_float64_reference(page_size: int, group: int, dim: int, longest: int) -> None:
    check_mixed_lengths(page_size, group, dim, longest, torch.bfloat16, AttentionLayer(1, dim**-0.5))


EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window of 1": {"sliding_window": 1},
    "window of 130": {"sliding_window": 130},
    "window of 1024": {"sliding_window": 1024},
    "soft cap": {"soft_cap": 5.0},
    "sinks": {"sinks": True},
    "all": {"sliding_window": 600, "soft_cap": 20.0, "sinks": True},
}


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (2, 128), (5, 128), (8, 64), (16, 128)])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("extras", EXTRAS)
def test_windows_caps_sinks_and_fp8_pools(
    page_size: int, group: int, dim: int, kv_dtype: torch.dtype, extras: str
) -> None:
    options = dict(EXTRAS[extras])
    if "sinks" in options:
        options["sinks"] = torch.linspace(-3, 9, 2 * group, dtype=torch.bfloat16, device="cuda")
    scales = (0.5, 1.5) if kv_dtype == FP8 else (1.0, 1.0)
    layer = AttentionLayer(1, dim**-0.5, kv_scales=scales, **options)
    check_mixed_lengths(page_size, group, dim, 2100, kv_dtype, layer)


def check_mixed_lengths(
    page_size: int, group: int, dim: int, longest: int, kv_dtype: torch.dtype, layer: AttentionLayer
) -> None:
    """Compare the attention of a batch. Slots of the pool outside of all requests are NaN. Repeated calls give equal results."""
    draw, device, heads = random.Random(page_size * group * dim * longest), torch.device("cuda"), 2
    lengths = [draw.randint(1, longest) for _ in range(12)] + [longest]
    counts = [
        draw.choice([length, draw.randint(1, length)]) for length in lengths
    ]  # queries; earlier tokens are cached
    num_pages = [-(-length // page_size) for length in lengths]
    pages = iter(draw.sample(range(1, sum(num_pages) + 5), sum(num_pages)))
    table = torch.zeros(len(lengths) + 1, max(num_pages) + 1, dtype=torch.int32)
    for row, num in enumerate(num_pages, 1):
        table[row, :num] = torch.tensor([next(pages) for _ in range(num)])
    table = table.to(device)
    pool = KVPool(KVPoolSpec(2, sum(num_pages) + 5, page_size, heads, dim, kv_dtype, device))
    pool.data.copy_(torch.full_like(pool.data, float("nan"), dtype=torch.bfloat16))
    keys_and_values = []
    for row, length in enumerate(lengths, 1):
        at = torch.arange(length, device=device)
        kv = torch.randn(2, length, heads, dim, device=device, dtype=torch.bfloat16)
        slots = table[row, at // page_size].long() * page_size + at % page_size
        pool.store(1, kv[0], kv[1], slots, layer.kv_scales)
        stored = (pages_of(1).view(-1, heads, dim)[slots].double() for pages_of in (pool.k, pool.v))
        keys_and_values.append([each * scale for each, scale in zip(stored, layer.kv_scales, strict=True)])
    offsets = np.cumsum([0, *counts])
    qkv = 3 * torch.randn(offsets[-1], heads * group + 2, dim, device=device, dtype=torch.bfloat16)
    q = qkv[:, : heads * group]
    spec = AttentionSpec(
        num_q_heads=heads * group,
        num_kv_heads=heads,
        head_dim=dim,
        page_size=page_size,
        max_batch=len(lengths),
        max_seq_len=longest,
        dtype=torch.bfloat16,
        kv_dtype=kv_dtype,
        device=device,
        sliding_windows=(layer.sliding_window,) if layer.sliding_window else (),
        soft_caps=(layer.soft_cap,) if layer.soft_cap else (),
        has_sinks=layer.sinks is not None,
    )
    attention = HopperAttention(spec, pool, table)
    batch = AttentionBatch(
        num_decodes=0,
        rows=torch.arange(1, len(lengths) + 1, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor(offsets, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        slots=torch.zeros(int(offsets[-1]), dtype=torch.int64, device=device),
        q_lens_host=np.array(counts, np.int32),
        seq_lens_host=np.array(lengths, np.int32),
    )
    results: list[torch.Tensor] = []
    for _ in range(3):
        results.append(torch.full((int(offsets[-1]), heads * group, dim), float("nan"), dtype=q.dtype, device=device))
        attention.attend_stored(q, layer, attention.plan(batch), results[-1])
    assert all(torch.equal(result, results[0]) for result in results)
    for request, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        k, v = keys_and_values[request]
        own = q[offsets[request] : offsets[request + 1]].view(count, heads, group, dim).double()
        scores = torch.einsum("qhgd,lhd->hgql", own, k) * layer.scale
        if layer.soft_cap:
            scores = layer.soft_cap * (scores / layer.soft_cap).tanh()
        ages = torch.arange(length - count, length, device=device)[:, None] - torch.arange(length, device=device)
        is_hidden = (ages < 0) | (ages >= (layer.sliding_window or length))
        scores = scores.masked_fill(is_hidden, float("-inf"))
        if layer.sinks is not None:
            sinks = layer.sinks.double().view(heads, group, 1, 1).expand(-1, -1, count, 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(-1)[..., :length]
        wanted = torch.einsum("hgql,lhd->qhgd", weights, v).flatten(1, 2)
        difference = (results[0][offsets[request] : offsets[request + 1]] - wanted).abs().max()
        assert difference < TOLERANCES[torch.bfloat16], (request, length, count)
