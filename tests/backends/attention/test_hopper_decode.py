"""Decode attention in CUDA C++: what it takes, that it compiles, and on a Hopper GPU that it is right in long batches."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from compile_cuda import compile_by_nvcc

from minisgl_backends.attention.hopper_backend import HopperAttention
from minisgl_backends.cuda.decode import BLOCKS, HopperDecode, Variant
from minisgl_core.kv.pool import KVPool, KVPoolSpec
from minisgl_core.testing.attention_kit import AttentionBackendTests
from minisgl_core.testing.attention_rig import TOLERANCES

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
SHAPES = [(group, dim, page_size) for group in (1, 2, 5, 8) for dim in (64, 128) for page_size in (8, 64, 128)]


@pytest.mark.parametrize(("group", "dim", "page_size"), SHAPES)
def test_two_thread_blocks_fit_on_a_processor(group: int, dim: int, page_size: int) -> None:
    variant = Variant(group, dim, page_size)
    assert variant.stages >= 3
    assert BLOCKS * (variant.shared_bytes + 1024) <= 228 * 1024


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize(("group", "dim", "page_size"), [(8, 128, 64), (5, 128, 16), (1, 64, 8)])
def test_it_compiles_without_spilling(group: int, dim: int, page_size: int, tmp_path: Path) -> None:
    assert "0 bytes spill stores" in compile_by_nvcc(Variant(group, dim, page_size).source(), tmp_path)


def test_it_says_what_it_needs() -> None:
    spec = AttentionBackendTests().spec((4, 2, 64), 16, torch.bfloat16)
    assert HopperAttention.unsupported(spec) == ["it is for Hopper GPUs, not for cpu"]


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("num_requests", [1, 3, 64, 256])
@pytest.mark.parametrize("longest", [40, 1500, 9000])
def test_batches_of_many_lengths(num_requests: int, longest: int) -> None:
    """Against float64, over a pool that is NaN where no request's tokens are; again and again by one kernel."""
    draw = random.Random(num_requests * longest)
    lengths = torch.tensor([draw.randint(1, longest) for _ in range(num_requests)], device="cuda", dtype=torch.int32)
    size, heads, group, dim, device = 64, 2, 5, 128, torch.device("cuda")
    counts = (-(-lengths // size)).tolist()
    pages = iter(draw.sample(range(1, sum(counts) + 9), sum(counts)))
    table = torch.zeros(num_requests + 1, max(counts), dtype=torch.int32)
    for row, count in enumerate(counts, 1):
        table[row, :count] = torch.tensor([next(pages) for _ in range(count)])
    shape = KVPoolSpec(1, sum(counts) + 9, size, heads, dim, torch.bfloat16, device)
    pool, table = KVPool(shape), table.to(device)
    pool.data.fill_(float("nan"))
    places = torch.arange(max(counts) * size, device=device)
    is_there = places < lengths[:, None]
    slots = table[1:, places // size].long() * size + places % size
    num = int(is_there.sum())
    keys, values = torch.randn(2, num, heads, dim, device=device, dtype=torch.bfloat16)
    pool.store(0, keys, values, slots[is_there])
    q = 3 * torch.randn(num_requests, heads * group, dim, device=device, dtype=torch.bfloat16)

    decode = HopperDecode(pool, heads * group)
    rows = torch.arange(1, num_requests + 1, device=device, dtype=torch.int32)
    results = []
    for _ in range(3):
        results.append(torch.full_like(q, float("nan")))
        decode(q, 0, dim**-0.5, table, rows, lengths, results[-1])
    assert all(torch.equal(result, results[0]) for result in results)
    assert (decode._letters == -1).all()
    start = 0
    for request, length in enumerate(lengths.tolist()):
        k, v = (each[start : start + length].double() for each in (keys, values))
        start += length
        scores = torch.einsum("hgd,lhd->hgl", q[request].view(heads, group, dim).double(), k) * dim**-0.5
        wanted = torch.einsum("hgl,lhd->hgd", scores.softmax(-1), v).flatten(0, 1)
        assert (results[0][request] - wanted).abs().max() < TOLERANCES[torch.bfloat16], (request, length)
