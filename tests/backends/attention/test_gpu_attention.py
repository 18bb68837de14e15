"""Every attention backend on a GPU. With pytest-xdist: ``pytest -m gpu tests/backends/attention -n 8 --dist loadscope``.

What is not installed is skipped with the reason. FlashInfer and FlashAttention 4 compile what they have not compiled before.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from minisgl_backends.attention.flash_backend import FlashAttention
from minisgl_backends.attention.flash_versions import VERSIONS
from minisgl_backends.attention.flashinfer_backend import FlashInferAttention
from minisgl_backends.attention.hopper_backend import HopperAttention
from minisgl_backends.attention.torch_backend import TorchAttention
from minisgl_backends.attention.triton_backend import TritonAttention
from minisgl_backends.attention.trtllm_backend import TrtllmAttention
from minisgl_core.contracts.attention import AttentionBackend, AttentionLayer, AttentionSpec
from minisgl_core.engine.combined_attention import CombinedAttention
from minisgl_core.kv.pool import KVPool
from minisgl_core.testing.attention_kit import AttentionBackendTests
from minisgl_core.testing.attention_rig import TOLERANCES, dense_attention
from minisgl_core.utils.fp8 import FP8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


class OnGpu(AttentionBackendTests):
    device = "cuda"
    dtypes = (torch.bfloat16,)
    head_shapes = ((16, 8, 128), (3, 3, 128), (6, 2, 128), (8, 1, 128))


class TestTorch(OnGpu):
    provider = TorchAttention
    tolerances = TOLERANCES | {torch.bfloat16: 8e-2}  # scores and weights are rounded on their way through memory
    test_scales = None  # type: ignore[assignment]  # that rounding grows with the scores


class TestTriton(OnGpu):
    provider = TritonAttention

    @pytest.mark.parametrize("is_fp8", [False, True], ids=["plain", "fp8"])
    @pytest.mark.parametrize(
        ("shape", "page_size", "dtype"),
        [
            ((9, 3, 64), 256, torch.float32),
            ((9, 3, 64), 16, torch.bfloat16),
            ((40, 8, 128), 64, torch.float16),
            ((2, 1, 256), 16, torch.bfloat16),
            ((64, 1, 64), 1, torch.bfloat16),
            ((128, 128, 192), 16, torch.bfloat16),  # DeepSeek-V3
            ((16, 1, 192), 64, torch.float32),
            ((32, 32, 80), 16, torch.bfloat16),
            ((24, 8, 96), 256, torch.float16),
            ((8, 8, 120), 16, torch.bfloat16),
            ((32, 8, 160), 64, torch.bfloat16),
        ],
    )
    def test_other_sizes_match_the_reference(
        self, shape: tuple[int, int, int], page_size: int, dtype: torch.dtype, is_fp8: bool
    ) -> None:
        spec = replace(self.spec(shape, page_size, dtype), kv_dtype=FP8 if is_fp8 else dtype)
        self.run(spec, decodes=[1, 3000, 257], prefills=[(0, 300), (700, 3)])


class TestTritonWithTwoColumnBlocks(OnGpu):
    """Heads that are not a power of two."""

    provider = TritonAttention
    head_shapes = ((16, 8, 192), (4, 4, 80), (8, 2, 96), (12, 4, 112), (4, 2, 120), (8, 2, 160))


class TestHopper(OnGpu):
    provider = HopperAttention
    page_sizes = (8, 16, 64)

    @pytest.mark.parametrize(
        ("shape", "page_size"),
        [((9, 3, 64), 256), ((5, 1, 64), 8), ((40, 8, 128), 64), ((64, 8, 128), 32), ((14, 2, 128), 128)],
    )
    def test_other_sizes_match_the_reference(self, shape: tuple[int, int, int], page_size: int) -> None:
        spec = self.spec(shape, page_size, torch.bfloat16)
        self.run(spec, decodes=[1, 3000, 257], prefills=[(0, 300), (700, 3)])
        self.run(spec, decodes=[1 + 37 * i % 900 for i in range(100)])


class TestFlashInfer(OnGpu):
    provider = FlashInferAttention
    page_sizes = (1, 16, 64)


class TestFlashInferOfSmallHeads(OnGpu):
    provider = FlashInferAttention
    head_shapes = ((9, 3, 64),)


class FlashAttention2(FlashAttention):
    versions = tuple(version for version in VERSIONS if version.number == 2)


class FlashAttention3(FlashAttention):
    versions = tuple(version for version in VERSIONS if version.number == 3)


class FlashAttention4(FlashAttention):
    versions = tuple(version for version in VERSIONS if version.number == 4)


class TestFlashAttention2(OnGpu):
    provider = FlashAttention2
    page_sizes = (256,)


class TestFlashAttention3(OnGpu):
    provider = FlashAttention3
    page_sizes = (1, 16, 128)
    head_shapes = (*OnGpu.head_shapes, (9, 3, 64))


class TestFlashAttention4(OnGpu):
    """Its kernels are compiled for each ratio of heads, which takes long: two of them."""

    provider = FlashAttention4
    page_sizes = (16, 128)
    head_shapes = ((16, 8, 128), (6, 2, 128))


class TestTrtllm(OnGpu):
    provider = TrtllmAttention
    page_sizes = (16, 64)


class FlashThenFlashInfer(CombinedAttention):
    """FlashAttention for prefills and FlashInfer for decodes (``--attn fa,fi``)."""

    capabilities = replace(FlashInferAttention.capabilities, fp8_kv=False)

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        return FlashAttention.unsupported(spec) + FlashInferAttention.unsupported(spec)

    def __init__(self, spec: AttentionSpec, pool: KVPool, page_table: torch.Tensor) -> None:
        parts = [backend(spec, pool, page_table) for backend in (FlashAttention, FlashInferAttention)]
        super().__init__(spec, pool, page_table, *parts)


class TestFlashThenFlashInfer(OnGpu):
    provider = FlashThenFlashInfer
    page_sizes = (16,)
    head_shapes = ((16, 8, 128),)


EACH_BACKEND = pytest.mark.parametrize(
    "backend", [TritonAttention, HopperAttention, FlashInferAttention, FlashAttention3, FlashAttention4]
)


@EACH_BACKEND
def test_plan_and_forward_never_synchronize(backend: type[AttentionBackend]) -> None:
    kit = OnGpu()
    spec = kit.spec((16, 8, 128), 16, torch.bfloat16)
    if reasons := backend.unsupported(spec):
        pytest.skip("; ".join(reasons))
    kit.provider = backend
    rig = kit.rig(spec, 3, 200)
    decode, prefill = rig.request(60, 200), rig.request(20, 200)
    for is_compiled in (False, True):
        batch = rig.batch([(decode, 1), (prefill, 40)], 1)
        q, k, v = rig.split(rig.inputs(batch))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if is_compiled else "default")
        try:
            rig.backend.forward(q, k, v, rig.layers[0], rig.backend.plan(batch))
        finally:
            torch.cuda.set_sync_debug_mode("default")


@EACH_BACKEND
def test_offsets_beyond_32_bits(backend: type[AttentionBackend]) -> None:
    kit = OnGpu()
    spec = kit.spec((16, 8, 128), 16, torch.bfloat16)
    if reasons := backend.unsupported(spec):
        pytest.skip("; ".join(reasons))
    num_pages = 2**31 // (16 * 8 * 128) + 20
    if torch.cuda.mem_get_info()[0] < 3 * num_pages * 16 * 8 * 128 * 2:
        pytest.skip("not enough free memory")
    kit.provider = backend
    rig = kit.rig(spec, 2, 100)
    pool = KVPool(replace(rig.pool.spec, num_pages=num_pages))
    prompt, again = rig.request(0, 100), rig.request(0, 100)  # 7 pages each
    prompt.pages, again.pages = list(range(num_pages - 7, num_pages)), list(range(num_pages - 14, num_pages - 7))
    for request in (prompt, again):
        rig.table.data[request.row, :7] = torch.tensor(request.pages)
    engine = backend(rig.spec, pool, rig.table.data)
    known: dict[int, list[torch.Tensor]] = {prompt.row: [], again.row: []}
    layer = AttentionLayer(0, 128**-0.5)
    for work, num_decodes in (([(prompt, 90), (again, 50)], 0), ([(prompt, 1), (again, 30)], 1)):
        batch = rig.batch(work, num_decodes)
        q, k, v = rig.split(rig.inputs(batch))
        out = engine.forward(q, k, v, layer, engine.plan(batch))
        start = 0
        for request, count in work:
            part = slice(start, start + count)
            start += count
            known[request.row].append(torch.stack((k[part], v[part])).cpu())
            keys, values = torch.cat(known[request.row], dim=1)
            expected = dense_attention(q[part].cpu(), keys, values, layer)
            assert (out[part].cpu().double() - expected).abs().max() < 3e-2
