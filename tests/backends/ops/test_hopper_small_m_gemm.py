"""Small-M GEMM in CUDA C++: its tilings, compilation of its variants, and on a Hopper GPU its results."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compile_cuda import compile_by_nvcc
from hopper_reference import HAS_HOPPER, reference
from hypothesis import given
from hypothesis import strategies as st

from minisgl_backends.cuda.gemm_common import BLOCK_K, LINE_BYTES
from minisgl_backends.cuda.gemm_tiling import (
    MAX_SMALL_M_ROWS,
    GemmTiling,
    choose_fp8_tiling,
    choose_tiling,
    worthwhile_rows,
)
from minisgl_backends.cuda.small_m_gemm import HopperSmallMGemm, StreamKWorkspace, Variant, supports_weight
from minisgl_backends.ops.hopper import HopperOps
from minisgl_backends.ops.triton_linear import TritonLinear
from minisgl_core.contracts.ops import LinearOps
from minisgl_core.testing.ops_kit import OpsTests

MATRICES = [
    (rows, inputs, gated, bias)
    for rows, inputs in (
        (4096, 1024),
        (1024, 3072),
        (5120, 5120),
        (336, 1024),
        (144, 192),
        (17408 * 2, 512),
        (16_976, 512),
    )
    for gated in (False, True)
    for bias in (False, True)
]


@given(
    st.integers(1, MAX_SMALL_M_ROWS),
    st.integers(1, 20_000).map(lambda n: 8 * n),
    st.integers(1, 400),
    st.integers(78, 160),
    st.sampled_from([(choose_tiling, BLOCK_K), (choose_fp8_tiling, LINE_BYTES)]),
)
def test_tilings_use_all_thread_blocks(
    rows: int, outputs: int, depth: int, num_sms: int, kind: tuple[Callable[[int, int, int, int], GemmTiling], int]
) -> None:
    choose, line = kind
    tiling = choose(rows, outputs, depth * line, num_sms)
    tiles = -(-outputs // tiling.outputs)
    assert tiling.outputs in (64, 128)
    assert 1 <= tiling.cluster * tiling.splits * tiling.row_parts <= 8  # the portable cluster size
    assert tiling.splits <= depth
    assert tiling.cluster == 1 or tiling.splits == tiling.row_parts == 1
    # All clusters are resident at once.
    assert tiling.splits == 1 or tiles * tiling.splits * tiling.row_parts <= num_sms
    assert tiling.row_multiple == tiling.row_parts * (16 if tiling.outputs == 64 else 8)
    assert tiling.num_blocks is None or 1 <= tiling.num_blocks <= num_sms
    # With a fixed number of thread blocks, each computes parts of one tile only.
    assert tiling.num_blocks is None or tiling.num_blocks % (tiles * tiling.row_parts) == 0


def test_cublas_takes_over_at_fewer_rows_for_large_matrices() -> None:
    assert worthwhile_rows(6144, 1024, gated=True) == MAX_SMALL_M_ROWS
    assert worthwhile_rows(34816, 5120, gated=False) < worthwhile_rows(34816, 5120, gated=True) < MAX_SMALL_M_ROWS


@pytest.mark.parametrize(
    ("rows", "row_parts"),
    [(rows, parts) for parts in (1, 2) for rows in range(16 * parts, MAX_SMALL_M_ROWS + 1, 16 * parts)],
)
@pytest.mark.parametrize("outputs", [64, 128])
def test_shared_memory_fits_stages_and_partial_sums(rows: int, row_parts: int, outputs: int) -> None:
    variant = Variant(rows, outputs, 1, 3, row_parts, gated=False, has_bias=False)
    assert variant.stages >= 4
    ring = variant.stages * (outputs + variant.block_rows) * BLOCK_K * 2
    row_groups = (variant.block_rows // 2 if outputs == 64 else variant.block_rows) // 8
    for splits in range(2, 8 // row_parts + 1):
        reduced = -(-row_groups // splits)
        staged = reduced * 8 * (2 * outputs + 16) * (2 if outputs == 64 else 1)
        assert splits * reduced * 256 * 16 + staged <= ring


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize(
    "variant",
    [
        Variant(MAX_SMALL_M_ROWS, 128, 2, 1, 1, gated=True, has_bias=False),
        Variant(MAX_SMALL_M_ROWS, 64, 1, 6, 1, gated=False, has_bias=False),
        Variant(232, 128, 2, 1, 1, gated=True, has_bias=False),
        Variant(160, 64, 1, 1, 1, gated=True, has_bias=True),
        Variant(96, 128, 1, 1, 1, gated=False, has_bias=True),
        Variant(16, 64, 1, 1, 1, gated=True, has_bias=True),
        Variant(128, 64, 1, 3, 1, gated=False, has_bias=True),
        Variant(160, 64, 1, 2, 2, gated=False, has_bias=False),
        Variant(MAX_SMALL_M_ROWS, 64, 1, 3, 2, gated=False, has_bias=True),
        Variant(MAX_SMALL_M_ROWS, 64, 1, 1, 2, gated=True, has_bias=False),
        Variant(240, 128, 4, 1, 1, gated=True, has_bias=False, fp8=True),
        Variant(MAX_SMALL_M_ROWS, 128, 1, 1, 2, gated=False, has_bias=True, fp8=True),
        Variant(MAX_SMALL_M_ROWS, 64, 1, 6, 1, gated=False, has_bias=True, fp8=True),
    ],
)
def test_variants_compile_without_spilling(variant: Variant, tmp_path: Path) -> None:
    log = compile_by_nvcc(variant.source(), tmp_path)
    assert "0 bytes spill stores" in log
    assert "serialized" not in log  # ptxas warns of serialized wgmmas


def test_other_gpus_are_refused() -> None:
    assert HopperOps.unsupported(torch.device("cpu"), torch.bfloat16) == ["it needs a Hopper GPU, not cpu"]


def test_gated_layers_prepare_gated_kernels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = []
    small_m = SimpleNamespace(
        ROW_SIZES=(16,),
        supports_weight=lambda weight, bias, *, gated: True,
        HopperSmallMGemm=lambda *args, scales, gated, row_sizes: prepared.append(gated),
    )
    monkeypatch.setattr(HopperOps, "__init__", TritonLinear.__init__)
    ops = HopperOps(torch.device("cpu"), torch.bfloat16)
    ops._hopper_small_m_gemm, ops._stream_k_workspace = small_m, None  # type: ignore[assignment]
    ops._max_small_m_rows = 0
    ops._hopper_gated_gemm = SimpleNamespace(supports_weight=lambda weight, bias: False)  # type: ignore[assignment]
    ops.prepare_gated(torch.zeros(32, 64, dtype=torch.bfloat16), None)
    assert prepared == [True]


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
class TestOnHopper:
    """Comparison with float64, with outputs in memory that was NaN."""

    @pytest.mark.parametrize(("rows", "inputs", "gated", "has_bias"), MATRICES)
    def test_results_match_a_float64_reference(self, rows: int, inputs: int, gated: bool, has_bias: bool) -> None:
        device = torch.device("cuda")
        weight = torch.randn(rows, inputs, device=device, dtype=torch.bfloat16) / inputs**0.5
        bias = torch.randn(rows, device=device, dtype=torch.bfloat16) if has_bias else None
        workspace = StreamKWorkspace(device)
        assert supports_weight(weight, bias, gated=gated)
        sizes = (16, 32, 48, 64, 96, 128, 152, 160, 192, 224, MAX_SMALL_M_ROWS)
        gemm = HopperSmallMGemm(weight, bias, workspace, gated=gated, row_sizes=sizes)
        for num_rows in (1, 7, 16, 17, 33, 64, 90, 128, 145, 160, 190, 224, MAX_SMALL_M_ROWS):
            x = torch.randn(num_rows, inputs + 8, device=device, dtype=torch.bfloat16)[:, :inputs]
            assert gemm.supports_input(x)
            wanted = reference(x, weight, bias, gated=gated)
            results = []
            for _ in range(3):  # each call must leave the workspace ready for the next
                torch.full_like(wanted, float("nan"), dtype=torch.bfloat16)  # the result likely gets this memory
                results.append(gemm(x))
            assert all(torch.equal(result, results[0]) for result in results)
            error = (results[0].double() - wanted).norm() / wanted.norm()
            assert error < 5e-3, (num_rows, float(error))
        assert not workspace.arrived.any()

    @pytest.mark.parametrize(("rows", "inputs", "gated", "has_bias"), [case for case in MATRICES if case[1] % 128 == 0])
    def test_fp8_results_match_a_float64_reference(self, rows: int, inputs: int, gated: bool, has_bias: bool) -> None:
        device = torch.device("cuda")
        quantize_rows = LinearOps(device, torch.bfloat16).quantize_rows  # the reference, in torch
        weight, scales = quantize_rows(torch.randn(rows, inputs, device=device) / inputs**0.5)
        bias = torch.randn(rows, device=device, dtype=torch.bfloat16) if has_bias else None
        workspace = StreamKWorkspace(device)
        assert supports_weight(weight, bias, gated=gated)
        sizes = (16, 32, 64, 128, 160, 224, MAX_SMALL_M_ROWS)
        gemm = HopperSmallMGemm(weight, bias, workspace, scales=scales.view(-1), gated=gated, row_sizes=sizes)
        for num_rows in (1, 7, 17, 64, 90, 128, 145, 190, MAX_SMALL_M_ROWS):
            # Rows of all magnitudes: a mistaken scale is no small error.
            factors = torch.rand(num_rows, 1, device=device).mul(8).sub(4).exp()
            x = (torch.randn(num_rows, inputs, device=device) * factors).bfloat16()
            x_q, x_scales = quantize_rows(x)
            assert gemm.supports_input(x)
            wanted = reference(x_q.double() * x_scales, weight.double() * scales, bias, gated=gated)
            results = []
            for _ in range(3):
                torch.full_like(wanted, float("nan"), dtype=torch.bfloat16)
                results.append(gemm(x_q, x_scales))
            assert all(torch.equal(result, results[0]) for result in results)
            errors = (results[0].double() - wanted).norm(dim=1) / wanted.norm(dim=1)
            assert errors.max() < 1e-2, (num_rows, float(errors.max()))
        assert not workspace.arrived.any()

    @pytest.mark.parametrize(("num_rows", "hidden"), [(72, 2048), (200, 1024)])
    def test_a_captured_chain_with_pdl_equals_one_without(self, num_rows: int, hidden: int) -> None:
        device, dtype = torch.device("cuda"), torch.bfloat16
        ops = HopperOps(device, dtype)
        gain = torch.rand(hidden, device=device, dtype=dtype)
        matrices = [
            torch.randn(*shape, device=device, dtype=dtype) * hidden**-0.5
            for shape in ((6 * hidden, hidden), (hidden, 3 * hidden))
        ]
        gate_up, down = ops.prepare_gated(matrices[0], None), ops.prepare_linear(matrices[1], None)
        x = torch.randn(num_rows, hidden, device=device, dtype=dtype)

        def run(*, synchronizes: bool) -> torch.Tensor:
            between = torch.cuda.synchronize if synchronizes else lambda: None
            hidden, residual = x.clone(), torch.zeros_like(x)
            for _ in range(20):
                hidden, residual = ops.add_rms_norm(hidden, residual, gain, 1e-6)
                between()
                hidden = gate_up(hidden)
                between()
                hidden = down(hidden)
                between()
            return hidden

        wanted = run(synchronizes=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run(synchronizes=False)
        for _ in range(50):
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(found, wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
class TestHopperOps(OpsTests):
    provider = HopperOps
    device = "cuda"
    dtypes = (torch.bfloat16,)
    fp8_dtypes = (torch.bfloat16,)
    shapes = ((70, 96), (64, 512), (4096, 1024))
    num_rows = (1, 16, 17, 100, 161, 257)
