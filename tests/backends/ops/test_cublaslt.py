"""GEMMs by algorithms of cuBLASLt: selection on a CPU, and results on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from minisgl_backends.cuda import cublaslt
from minisgl_backends.cuda.cublaslt import GemmTuner, new_tuner
from minisgl_backends.ops.triton_linear import TritonLinear

SHAPES = [(7168, 5120), (5120, 17408), (2048, 4096), (1048, 8008)]


def test_only_half_precision_on_gpus_is_tuned() -> None:
    assert new_tuner(torch.device("cpu"), torch.bfloat16) is None
    assert new_tuner(torch.device("cuda"), torch.float32) is None


def test_a_missing_library_leaves_gemms_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "_library", cublaslt._library.__wrapped__)
    monkeypatch.setattr(torch.version, "cuda", "1.0")
    assert new_tuner(torch.device("cuda"), torch.bfloat16) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
class TestOnGpu:
    device = torch.device("cuda")

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
    def test_tuned_gemms_match_a_float64_reference(self, outputs: int, inputs: int, dtype: torch.dtype) -> None:
        tuner = GemmTuner(self.device, dtype)
        weight = torch.randn(outputs, inputs, device=self.device, dtype=dtype) / inputs**0.5
        for num_rows in (1, 264, 320, 640, 832, 1152):
            x = torch.randn(num_rows, inputs, device=self.device, dtype=dtype)
            with tuner.tuning():
                found = tuner.gemm(x, weight)
            wanted = x.double() @ weight.double().T
            assert (found.double() - wanted).norm() / wanted.norm() < 5e-3
            assert torch.equal(tuner.gemm(x, weight), found)
            torch.testing.assert_close(tuner.gemm(_unaligned(x), weight), found, rtol=0, atol=0.05)

    def test_the_choice_does_not_change_results(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It depends on measured times, and tokens must not."""
        monkeypatch.setattr(cublaslt, "_MIN_GAIN", 2.0)  # so that an algorithm is found for nearly all shapes
        tuner = GemmTuner(self.device, torch.bfloat16)
        for outputs, inputs in SHAPES:
            weight = torch.randn(outputs, inputs, device=self.device, dtype=torch.bfloat16) / inputs**0.5
            for num_rows in (320, 640, 832, 1152):
                x = torch.randn(num_rows, inputs, device=self.device, dtype=torch.bfloat16)
                with tuner.tuning():
                    assert torch.equal(tuner.gemm(x, weight), F.linear(x, weight))
        assert any(tuner._plans.values())

    @pytest.mark.parametrize("function", ["cublasLtMatmul", "cublasLtMatmulAlgoGetHeuristic"])
    def test_a_failure_leaves_the_shape_to_torch(self, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
        tuner, call = GemmTuner(self.device, torch.bfloat16), cublaslt._call

        def fail(name: str, *arguments: Any) -> None:
            if name == function:
                raise RuntimeError(f"{name} failed with status 15")
            call(name, *arguments)

        monkeypatch.setattr(cublaslt, "_call", fail)
        x, weight = (torch.randn(each, 4096, device=self.device, dtype=torch.bfloat16) for each in (640, 2048))
        with tuner.tuning():
            assert torch.equal(tuner.gemm(x, weight), F.linear(x, weight))
        assert list(tuner._plans.values()) == [None]

    def test_measuring_ends_when_its_time_is_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cublaslt, "_MAX_SECONDS", 1e-9)
        tuner, tune, tuned = GemmTuner(self.device, torch.bfloat16), GemmTuner._tune, list[int]()
        monkeypatch.setattr(
            GemmTuner, "_tune", lambda self, x, weight: (tuned.append(len(x)), tune(self, x, weight))[1]
        )
        x, weight = (torch.randn(each, 4096, device=self.device, dtype=torch.bfloat16) for each in (640, 2048))
        with tuner.tuning():
            tuner.gemm(x, weight)
            tuner.gemm(x[:320], weight)
        assert tuned == [640]

    def test_only_shapes_within_the_context_are_measured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("minisgl_backends.cuda.cublaslt._MIN_GAIN", 2.0)  # so that an algorithm is always found
        ops = TritonLinear(self.device, torch.bfloat16)
        weight = torch.randn(4096, 2560, device=self.device, dtype=torch.bfloat16) / 50
        linear, x = ops.prepare_linear(weight, None), torch.randn(1024, 2560, device=self.device, dtype=torch.bfloat16)
        linear(x)
        assert ops._tuner._plans == {}
        with ops.tuning():
            linear(x[:640])
            linear(x[:640])
            linear(x[:256])
            ops.prepare_linear(weight[:2048], None)(x)
        linear(x)
        assert list(ops._tuner._plans) == [(640, 4096, 2560)]
        assert ops._tuner._plans[640, 4096, 2560] is not None
        found, graph = torch.empty(0), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = linear(x[:640])
        found.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(found, F.linear(x[:640], weight))


def _unaligned(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of x at an address that is not a multiple of 256 bytes."""
    return x.new_empty(x.numel() + 8)[8:].view_as(x).copy_(x)
