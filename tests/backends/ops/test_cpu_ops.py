"""The reference in torch, and the CPU kernels."""

from __future__ import annotations

import pytest
import torch

from minisgl_backends.ops.native import NativeOps
from minisgl_backends.ops.onednn import OneDnnOps
from minisgl_core.contracts.ops import TorchOps
from minisgl_core.platforms.cpu import CpuPlatform
from minisgl_core.testing.ops_kit import OpsTests

CPU = torch.device("cpu")


class TestTorch(OpsTests):
    provider = TorchOps


class TestOneDnn(OpsTests):
    provider = OneDnnOps


class TestNative(OpsTests):
    provider = NativeOps


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("kernels", [OneDnnOps, NativeOps])
def test_gemms_of_one_row_restore_the_onednn_setting(kernels: type[OneDnnOps], is_on: bool) -> None:
    if reasons := kernels.unsupported(CPU, torch.bfloat16):
        pytest.skip("; ".join(reasons))
    op = kernels(CPU, torch.bfloat16).prepare_linear(torch.randn(8, 6).bfloat16(), None)
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(is_on)
    try:
        op(torch.randn(1, 6).bfloat16())
        assert torch._C._get_mkldnn_enabled() == is_on
    finally:
        torch._C._set_mkldnn_enabled(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernels", [OneDnnOps, NativeOps])
def test_graphs_can_capture_gemms(kernels: type[OneDnnOps], dtype: torch.dtype) -> None:
    if reasons := kernels.unsupported(CPU, dtype):
        pytest.skip("; ".join(reasons))
    ops = kernels(CPU, dtype)
    gated = ops.prepare_gated(torch.randn(32, 64).to(dtype), None)
    linear = ops.prepare_linear(torch.randn(8, 16).to(dtype), torch.randn(8).to(dtype))
    with torch.inference_mode():
        for num_rows in (1, 3):
            x = torch.randn(num_rows, 64).to(dtype)
            graph, found = CpuPlatform().capture_graph(lambda x=x: linear(gated(x)))
            x.copy_(torch.randn(num_rows, 64))
            graph.replay()
            assert torch.equal(found, linear(gated(x)))


@pytest.mark.parametrize("prepare", ["prepare_linear", "prepare_gated"])
def test_inputs_of_another_width_or_dtype_are_refused(prepare: str) -> None:
    """The C kernel would read past the end of x."""
    if reasons := NativeOps.unsupported(CPU, torch.bfloat16):
        pytest.skip("; ".join(reasons))
    op = getattr(NativeOps(CPU, torch.bfloat16), prepare)(torch.randn(32, 64).bfloat16(), None)
    for x in (torch.randn(2, 64), torch.randn(2, 62).bfloat16(), torch.randn(2, 66).bfloat16()):
        with pytest.raises((TypeError, RuntimeError)):
            op(x)


@pytest.mark.parametrize("ops", [TorchOps, NativeOps])
def test_decode_outputs_of_strided_tokens_are_stored(ops: type[TorchOps]) -> None:
    tokens, rows = torch.arange(8)[::2], torch.arange(8, dtype=torch.int32)[1::2]
    last_tokens, mapped_tokens = torch.full((8,), -1, dtype=torch.int32), torch.full((2, 4), -1)
    ops(CPU, torch.float32).decode_outputs(tokens, rows, last_tokens, mapped_tokens, torch.ones(1, dtype=torch.int32))
    assert last_tokens.tolist() == [-1, 0, -1, 2, -1, 4, -1, 6]
    assert mapped_tokens.tolist() == [[-1] * 4, [0, 2, 4, 6]]
