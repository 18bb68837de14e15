"""GEMM with fused gated activation in CUDA C++: compilation, selection, and on a Hopper GPU its results."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from compile_cuda import compile_by_nvcc
from hopper_reference import HAS_HOPPER, reference

from minisgl_backends.cuda.gated_gemm import HopperGatedGemm, source, supports_weight, worthwhile
from minisgl_backends.cuda.gemm_tiling import MAX_SMALL_M_ROWS
from minisgl_backends.ops.hopper import HopperOps


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_kernel_compiles_without_spilling(tmp_path: Path) -> None:
    log = compile_by_nvcc(source(), tmp_path)
    assert "0 bytes spill stores" in log
    assert "serialized" not in log  # ptxas warns of serialized wgmmas


@pytest.mark.parametrize(("outputs", "inputs"), [(17_408, 5120), (3072, 1024), (6400, 5120), (1024, 512)])
def test_the_kernel_is_selected_only_for_nearly_full_waves(outputs: int, inputs: int) -> None:
    taken = [rows for rows in range(20_000) if worthwhile(rows, outputs, inputs, 132)]
    assert taken[0] > MAX_SMALL_M_ROWS
    assert worthwhile(8192, outputs, inputs, 132)
    for rows in taken:
        tiles = -(-rows // 256) * -(-outputs // 128)
        assert tiles > (1 - 160 / inputs) * -(-tiles // 66) * 66


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
class TestOnHopper:
    """Comparison with float64, with outputs in memory that was NaN."""

    @pytest.mark.parametrize(
        ("matrix_rows", "inputs"), [(34816, 512), (6144, 1024), (25_600, 256), (336, 128), (144, 192), (16, 5120)]
    )
    def test_results_match_a_float64_reference(self, matrix_rows: int, inputs: int) -> None:
        device = torch.device("cuda")
        weight = torch.randn(matrix_rows, inputs, device=device, dtype=torch.bfloat16) / inputs**0.5
        assert supports_weight(weight, None)
        gemm = HopperGatedGemm(weight)
        for num_rows in (1, 64, 129, 256, 300, 1000, 2049, 4500):
            x = torch.randn(num_rows, inputs + 8, device=device, dtype=torch.bfloat16)[:, :inputs]
            wanted = reference(x, weight, None, gated=True)
            torch.full_like(wanted, float("nan"), dtype=torch.bfloat16)  # the result likely gets this memory
            results = [gemm(x) for _ in range(3)]
            assert all(torch.equal(result, results[0]) for result in results)
            error = (results[0].double() - wanted).norm() / wanted.norm()
            assert error < 5e-3, (num_rows, float(error))

    def test_unsupported_inputs_fall_back_to_other_kernels(self) -> None:
        device, dtype = torch.device("cuda"), torch.bfloat16
        ops = HopperOps(device, dtype)
        weight = torch.randn(512, 128, device=device, dtype=dtype) / 12
        bias = torch.randn(512, device=device, dtype=dtype)
        assert not supports_weight(weight, bias)
        assert not supports_weight(weight[:, :64].contiguous(), None)
        assert not supports_weight(weight[:504], None)
        x = torch.randn(66 * 128, 128, device=device, dtype=dtype)  # tiles for 66 pairs of SMs
        gemm = HopperGatedGemm(weight)
        assert gemm.supports_input(x)
        assert not gemm.supports_input(x[:256])
        assert not gemm.supports_input(x.half())
        assert not gemm.supports_input(x.t().contiguous().t())
        for each, its_bias in (
            (x, None), (x[:256], None), (x.view(2, -1, 128), None), (x.t().contiguous().t(), None), (x, bias),
        ):  # fmt: skip
            found = ops.prepare_gated(weight, its_bias)(each)
            wanted = reference(each.reshape(-1, 128), weight, its_bias, gated=True)
            assert found.shape == (*each.shape[:-1], 256)
            error = (found.reshape(-1, 256).double() - wanted).norm() / wanted.norm()
            assert error < 5e-3
