"""Decode attention in CUDA C++: requirements, compilation, and on a Hopper GPU its results."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compile_cuda import compile_by_nvcc
from hopper_reference import HAS_HOPPER

from minisgl_backends.attention.hopper_backend import HopperAttention
from minisgl_backends.cuda.decode import BLOCKS_PER_SM, HopperDecode, RopeAndStore, Variant
from minisgl_backends.ops.triton_ops import TritonOps
from minisgl_core.contracts.attention import AttentionLayer
from minisgl_core.contracts.kv_cache import KVPoolSpec
from minisgl_core.contracts.ops import Rope
from minisgl_core.kv.pool import KVPool
from minisgl_core.testing.attention_kit import AttentionBackendTests
from minisgl_core.testing.attention_rig import TOLERANCES, AttentionRig, quarter_turns
from minisgl_core.utils.fp8 import FP8

SHAPES = [(group, dim, page_size) for group in (1, 2, 5, 8) for dim in (64, 128) for page_size in (8, 64, 128)]


@pytest.mark.parametrize(("group", "dim", "page_size"), SHAPES)
def test_two_thread_blocks_fit_on_an_sm(group: int, dim: int, page_size: int) -> None:
    variant = Variant(group, dim, page_size)
    assert variant.stages >= 3
    assert BLOCKS_PER_SM * (variant.shared_bytes + 1024) <= 228 * 1024


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize(("group", "dim", "page_size"), [(8, 128, 64), (5, 128, 16), (1, 64, 8)])
@pytest.mark.parametrize("fused", [(False, False), (True, False), (True, True)], ids=["plain", "rope", "norm and rope"])
def test_variants_compile_without_spilling(
    group: int, dim: int, page_size: int, fused: tuple[bool, bool], tmp_path: Path
) -> None:
    assert "0 bytes spill stores" in compile_by_nvcc(Variant(group, dim, page_size, *fused).source(), tmp_path)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("group", [1, 5, 8])
def test_fp8_variants_compile_without_spilling(group: int, tmp_path: Path) -> None:
    assert "0 bytes spill stores" in compile_by_nvcc(Variant(group, 128, 64, fp8=True).source(), tmp_path)


def test_other_gpus_are_refused() -> None:
    spec = AttentionBackendTests().spec((4, 2, 64), 16, torch.bfloat16)
    assert HopperAttention.unsupported(spec) == ["it needs a Hopper GPU, not cpu"]


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("num_requests", [1, 3, 64, 256])
@pytest.mark.parametrize("longest", [40, 1500, 9000])
@pytest.mark.parametrize(("kv_dtype", "scales"), [(torch.bfloat16, (1.0, 1.0)), (FP8, (0.5, 1.5))], ids=["bf16", "fp8"])
def test_mixed_lengths_match_a_float64_reference(
    num_requests: int, longest: int, kv_dtype: torch.dtype, scales: tuple[float, float]
) -> None:
    """Slots of the pool outside of all requests are NaN. One kernel object serves repeated calls in two layers."""
    draw = random.Random(num_requests * longest)
    lengths = torch.tensor([draw.randint(1, longest) for _ in range(num_requests)], device="cuda", dtype=torch.int32)
    size, heads, group, dim, device = 64, 2, 5, 128, torch.device("cuda")
    counts = (-(-lengths // size)).tolist()
    pages = iter(draw.sample(range(1, sum(counts) + 9), sum(counts)))
    table = torch.zeros(num_requests + 1, max(counts), dtype=torch.int32)
    for row, count in enumerate(counts, 1):
        table[row, :count] = torch.tensor([next(pages) for _ in range(count)])
    shape = KVPoolSpec(2, sum(counts) + 9, size, heads, dim, kv_dtype, device)
    pool, table = KVPool(shape), table.to(device)
    pool.data.copy_(torch.tensor(float("nan")).to(kv_dtype))
    places = torch.arange(max(counts) * size, device=device)
    is_there = places < lengths[:, None]
    slots = table[1:, places // size].long() * size + places % size
    num = int(is_there.sum())
    # The values in the pool are K and V divided by their scales.
    keys, values = torch.randn(2, num, heads, dim, device=device).to(kv_dtype)
    for layer in range(2):
        pool.store(layer, keys.bfloat16(), values.bfloat16(), slots[is_there])
    q = 3 * torch.randn(num_requests, heads * group, dim, device=device, dtype=torch.bfloat16)

    decode = HopperDecode(pool, heads * group)
    rows = torch.arange(1, num_requests + 1, device=device, dtype=torch.int32)
    results = []
    for layer in (0, 1, 1, 0, 1):
        results.append(torch.full_like(q, float("nan")))
        decode(q, layer, dim**-0.5, table, rows, lengths, results[-1], kv_scales=scales)
    assert all(torch.equal(result, results[0]) for result in results)
    assert (decode._partials == -1).all()
    for layer in range(2):  # fewer requests have other split-KV partitions
        few = torch.full_like(q[::2], float("nan"))
        batch = rows[::2].contiguous(), lengths[::2].contiguous()
        decode(q[::2].contiguous(), layer, dim**-0.5, table, *batch, few, kv_scales=scales)
        torch.testing.assert_close(few, results[0][::2], atol=TOLERANCES[torch.bfloat16], rtol=0)
    start = 0
    for request, length in enumerate(lengths.tolist()):
        k, v = (
            each[start : start + length].double() * scale for each, scale in zip((keys, values), scales, strict=True)
        )
        start += length
        scores = torch.einsum("hgd,lhd->hgl", q[request].view(heads, group, dim).double(), k) * dim**-0.5
        wanted = torch.einsum("hgl,lhd->hgd", scores.softmax(-1), v).flatten(0, 1)
        assert (results[0][request] - wanted).abs().max() < TOLERANCES[torch.bfloat16], (request, length)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
def test_fused_rope_accepts_any_strides() -> None:
    spec = replace(AttentionBackendTests().spec((4, 2, 64), 16, torch.bfloat16), device=torch.device("cuda"))
    spec = replace(spec, max_seq_len=64, max_batch=3)
    outs = []
    for is_dense in (True, False):
        rig = AttentionRig(HopperAttention, spec, [AttentionLayer(0, 0.125)], num_pages=20)
        batch = rig.batch([(rig.request(length, 64), 1) for length in (0, 15, 40)], 3)
        parts = rig.split(rig.inputs(batch))
        given = parts if is_dense else tuple(part.mT.contiguous().mT for part in parts)
        rope = quarter_turns(3, parts[0])
        backend, plan = rig.backend, rig.backend.plan(batch)
        assert isinstance(backend, HopperAttention)
        assert backend.supports_fused_rope(plan, rope)
        outs.append((backend.attend_fused_rope(*given, rig.layers[0], rope, plan), rig.pool.data))
    torch.testing.assert_close(outs[0], outs[1], atol=0, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("group", [1, 5, 8])
@pytest.mark.parametrize("has_norms", [True, False])
def test_fused_rope_matches_separate_rope_and_store(dim: int, group: int, has_norms: bool) -> None:
    """The reference is Triton's RoPE kernel and this kernel without RoPE; few values differ by rounding of reordered sums."""
    draw, device, heads, size = random.Random(dim * group), torch.device("cuda"), 2, 16
    lengths = [draw.randint(1, 400) for _ in range(40)] + [1, 16, 17, 64, 65]
    counts = [-(-length // size) for length in lengths]
    table = torch.zeros(len(lengths) + 1, max(counts), dtype=torch.int32)
    pages = iter(draw.sample(range(1, sum(counts) + 1), sum(counts)))
    for row, count in enumerate(counts, 1):
        table[row, :count] = torch.tensor([next(pages) for _ in range(count)])
    last = torch.tensor(lengths) - 1
    slots = (table[torch.arange(1, len(table)), last // size].long() * size + last % size).to(device)
    requests = table.to(device), torch.arange(1, len(table), device=device, dtype=torch.int32)
    seq_lens = torch.tensor(lengths, device=device, dtype=torch.int32)
    pools = [KVPool(KVPoolSpec(1, sum(counts) + 1, size, heads, dim, torch.bfloat16, device)) for _ in range(2)]
    pools[0].data.normal_()
    pools[1].data.copy_(pools[0].data)
    for pool in pools:  # the slot of the new key may hold stale data
        pool.kv(0).flatten(1, 2)[:, slots] = float("nan")
    fused = torch.randn(len(lengths), heads * (group + 2), dim, device=device, dtype=torch.bfloat16)
    angles = 100 * torch.randn(len(lengths), dim // 2, device=device)
    gains = torch.randn(2, dim, device=device, dtype=torch.bfloat16)
    norms = (gains[0], gains[1]) if has_norms else None
    rope = Rope(angles.cos().bfloat16(), angles.sin().bfloat16(), norms, 1e-6)
    q, k, v = torch.split(fused, [heads * group, heads, heads], dim=1)

    outs = [torch.empty(q.shape, device=device, dtype=torch.bfloat16) for _ in range(2)]
    turned = TritonOps(device, torch.bfloat16).qk_norm_rope_kv_store(
        q.clone(), k.clone(), v, rope, pools[0].k(0), pools[0].v(0), slots
    )
    HopperDecode(pools[0], heads * group)(turned, 0, dim**-0.5, *requests, seq_lens, outs[0])
    decode = HopperDecode(pools[1], heads * group)
    assert decode.supports_fused_rope(rope)
    decode(q, 0, dim**-0.5, *requests, seq_lens, outs[1], RopeAndStore(k, v, rope, slots))
    torch.testing.assert_close(outs[1], outs[0], atol=2e-2, rtol=2e-2)
    new = [pool.kv(0).flatten(1, 2)[:, slots] for pool in pools]
    torch.testing.assert_close(new[1], new[0], atol=2**-6, rtol=2**-7)
    assert (new[1] != new[0]).float().mean() < 0.01
    for pool in pools:
        pool.kv(0).flatten(1, 2)[:, slots] = 0
    assert torch.equal(pools[1].data, pools[0].data)
