"""Quantized GEMMs on a GPU."""

from __future__ import annotations

import pytest
import torch
from fp8_checkpoints import BLOCKS, PER_CHANNEL, PER_TENSOR
from int4_checkpoints import FORMATS
from int8_checkpoints import FORMATS as INT8

from minisgl_backends.moe.triton_kernel import TritonMoe
from minisgl_backends.ops.triton_ops import TritonOps
from minisgl_backends.quantization.fp8 import Fp8
from minisgl_backends.quantization.int4 import Int4
from minisgl_backends.quantization.int8 import Int8
from minisgl_core.contracts.ops import LinearOps
from minisgl_core.contracts.quantization import Quantization
from minisgl_core.testing.packed_checkpoint import PackedCheckpoint
from minisgl_core.testing.quantization_kit import PLAIN, QuantizationTests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


class TestFp8(QuantizationTests):
    provider = Fp8
    ops = TritonOps
    device = "cuda"
    dtypes = (torch.bfloat16,)
    shapes = ((64, 128), (48, 32), (6144, 1024), (1024, 3072), (24, 40))
    checkpoints = (PER_TENSOR, PER_CHANNEL, BLOCKS)


class TestInt4(QuantizationTests):
    provider = Int4
    ops = TritonOps
    device = "cuda"
    dtypes = (torch.bfloat16, torch.float16)
    loss = 0.15


class TestInt4Checkpoints(TestInt4):
    shapes = ((64, 128), (48, 32), (320, 1024), (24, 40))
    checkpoints = tuple(FORMATS.values())
    loss = 0.01

    def cases(self, num_experts: int = 0) -> list[tuple[Quantization, PackedCheckpoint]]:
        return [each for each in super().cases(num_experts) if each[1] is not PLAIN]


class TestInt4Experts(TestInt4Checkpoints):
    """The grouped kernel for experts dequantizes in registers."""

    moe_kernel = TritonMoe


class TestInt8(QuantizationTests):
    provider = Int8
    ops = TritonOps
    device = "cuda"
    dtypes = (torch.bfloat16, torch.float16)
    shapes = ((64, 128), (48, 32), (320, 1024), (24, 40))
    checkpoints = tuple(INT8.values())
    loss = 0.02


@pytest.mark.parametrize("num_rows", [1, 16, 17, 300])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 128), (6144, 1024), (1024, 3072), (5120, 17408)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_fp8_gemms_match_the_reference(num_rows: int, outputs: int, inputs: int, has_bias: bool) -> None:
    """Both multiply the same FP8 values, so the results differ by rounding alone."""
    device = torch.device("cuda")
    ours, reference = TritonOps(device, torch.bfloat16), LinearOps(device, torch.bfloat16)
    weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16) / inputs**0.5
    codes, scales = reference.quantize_rows(weight)
    bias = torch.randn(outputs, device=device, dtype=torch.bfloat16) if has_bias else None
    x = torch.randn(num_rows, inputs, device=device, dtype=torch.bfloat16)
    for prepare in ("prepare_fp8_linear", "prepare_fp8_gated"):
        arguments = codes, scales.view(-1), bias
        found, expected = getattr(ours, prepare)(*arguments)(x), getattr(reference, prepare)(*arguments)(x)
        # Tensor cores accumulate FP8 with fewer bits than float32 has, so the error grows with the number of inputs.
        assert (found.float() - expected.float()).norm() < 2e-2 * expected.float().norm()


def test_a_cuda_graph_replays_an_fp8_gemm() -> None:
    device = torch.device("cuda")
    ops = TritonOps(device, torch.bfloat16)
    codes, scales = ops.quantize_rows(torch.randn(256, 512, device=device, dtype=torch.bfloat16))
    op = ops.prepare_fp8_linear(codes, scales.view(-1), None)
    x = torch.randn(32, 512, device=device, dtype=torch.bfloat16)
    op(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(x)
    x.normal_()
    graph.replay()
    assert torch.equal(out, op(x))
