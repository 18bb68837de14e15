"""W4A16 GEMM in CUDA C++: order of the codes, tilings, compilation of its variants, and on a Hopper GPU its results."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from compile_cuda import compile_by_nvcc
from hopper_reference import HAS_HOPPER, reference
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from minisgl_backends.cuda.gemm_common import load_kernel
from minisgl_backends.cuda.gemm_tiling import MAX_SMALL_M_ROWS, GemmTiling
from minisgl_backends.cuda.int4_gemm import (
    MAX_PAIRED_ROWS,
    ROW_SIZES,
    HopperInt4Gemm,
    Variant,
    choose_tiling,
    supports_weight,
)
from minisgl_backends.cuda.small_m_gemm import StreamKWorkspace
from minisgl_backends.kernels.int4_gemm import scale_words
from minisgl_backends.kernels.int4_stages import INPUTS, dequantize_stages, fragment_order, pack_stages
from minisgl_backends.kernels.int4_weight import Int4Weight
from minisgl_backends.kernels.split_k import SplitKWorkspace
from minisgl_backends.quantization import int4_gpu


def test_a_threads_words_are_its_registers_of_wgmma() -> None:
    """The rows and columns are those of the figure of fragment A of wgmma.m64k16 in the PTX ISA."""
    codes = torch.arange(64 * INPUTS).view(1, 1, 64, INPUTS)
    # An element of `codes` names its output and input; element j of a row is the words' inputs j, 32 + j, ... in turn.
    for quarter in range(4):
        elements = codes[..., quarter * 32 : quarter * 32 + 32].to(torch.int16).contiguous()
        words = fragment_order(elements).view(2, 128, 4, 2)
        for thread in (0, 1, 5, 31, 37, 127):
            for half in range(2):
                for register in range(4):
                    row = thread // 32 * 16 + thread % 32 // 4 + register % 2 * 8
                    column = quarter * 32 + half * 16 + thread % 4 * 2 + register // 2 * 8
                    expected = [row * INPUTS + column, row * INPUTS + column + 1]
                    assert words[half, thread, register].tolist() == expected


def test_inputs_that_tma_cannot_map_are_unsupported() -> None:
    with FakeTensorMode():
        weights = (Int4Weight.empty(64, size, None, torch.bfloat16, torch.device("cuda")) for size in (128, 124, 0))
        assert [supports_weight(each) for each in weights] == [True, False, False]


@given(st.integers(1, MAX_SMALL_M_ROWS), st.integers(1, 400), st.integers(78, 160))
def test_tilings_fit_registers_and_clusters(rows: int, blocks: int, num_sms: int) -> None:
    tiling = choose_tiling(rows, blocks, num_sms)
    assert tiling.splits == 1
    assert tiling.cluster * tiling.row_parts <= 8  # the portable cluster size
    assert rows <= tiling.row_parts * 128


@pytest.mark.parametrize("rows", ROW_SIZES)
@pytest.mark.parametrize("scales", MAX_PAIRED_ROWS)
def test_stages_hide_the_latency_of_memory(rows: int, scales: int) -> None:
    for half in (0, 1) if rows <= MAX_PAIRED_ROWS[scales] else (None,):
        variant = Variant(rows, 1, 1 if rows <= 128 else 2, scales, gated=False, has_bias=False, half=half)
        assert variant.block_rows % 8 == 0
        assert variant.stages >= 4


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize(
    "variant",
    [
        Variant(8, 2, 1, 1, gated=True, has_bias=False, half=0),
        Variant(16, 2, 1, 4, gated=False, has_bias=True),
        Variant(16, 2, 1, 2, gated=True, has_bias=False, half=1),
        Variant(32, 2, 1, 2, gated=False, has_bias=True, half=1),
        Variant(64, 1, 1, 4, gated=False, has_bias=True),
        Variant(128, 2, 1, 2, gated=True, has_bias=True),
        Variant(MAX_SMALL_M_ROWS, 1, 2, 1, gated=True, has_bias=False),
        Variant(MAX_SMALL_M_ROWS, 4, 2, 4, gated=False, has_bias=False),
    ],
)
def test_variants_compile_without_spilling(variant: Variant, tmp_path: Path) -> None:
    log = compile_by_nvcc(variant.source(), tmp_path)
    assert "0 bytes spill stores" in log
    assert "serialized" not in log  # ptxas warns of serialized wgmmas


@pytest.mark.parametrize(
    ("rows", "columns", "block", "gated"),
    [(136, 200, 32, False), (272, 300, 64, True), (64, 512, 256, False), (130, 130, None, True)],
)
def test_panels_are_dequantized_from_stages(rows: int, columns: int, block: int | None, gated: bool) -> None:
    """The kernel for many rows, from both layouts."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weight = random_weight(rows, columns, block, gated=gated, dtype=torch.float16, device=device)
    known = weight.dequantize(0, len(weight.codes))
    words = scale_words(weight)
    out = torch.full_like(known, float("nan"))
    dequantize_stages(pack_stages(weight, words), 0, out, gated=gated)
    assert torch.equal(out, known)
    second = torch.full_like(known[:64], float("nan"))
    dequantize_stages(pack_stages(weight, words), len(weight.codes) - 1, second, gated=gated)
    assert torch.equal(second, known[-64:])


def random_weight(
    rows: int, columns: int, block: int | None, *, gated: bool, dtype: torch.dtype, device: torch.device
) -> Int4Weight:
    """Return a packed weight of random codes, scales and zero points."""
    weight = Int4Weight.empty(rows, columns, block, dtype, device, has_zeros=True, gated=gated)
    for start, size in ((0, rows // 2), (rows // 2, rows - rows // 2)):
        at = weight.rows_of(start, size)
        weight.store(at, torch.randint(16, (size, columns), dtype=torch.uint8, device=device))
        groups = -(-columns // weight.block)
        weight.scales[:groups, at] = (torch.rand(groups, size, device=device) + 0.5).div(4 * columns**0.5).to(dtype)
        assert weight.zeros is not None
        weight.zeros[:groups, at] = torch.randint(16, (groups, size), dtype=torch.uint8, device=device)
    return weight


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
class TestOnHopper:
    """Comparison with float64, with outputs in memory that was NaN."""

    @pytest.mark.parametrize("gated", [False, True])
    @pytest.mark.parametrize("has_bias", [False, True])
    @pytest.mark.parametrize(
        ("rows", "columns", "block"),
        [(7168, 5120, 128), (5120, 5120, 128), (17408, 1024, 64), (192, 640, 32), (336, 4352, 256), (144, 1000, None)],
    )
    def test_results_match_a_float64_reference(
        self, rows: int, columns: int, block: int | None, has_bias: bool, gated: bool
    ) -> None:
        weight, *known = random_matrix(rows, columns, block, gated=gated)
        bias = torch.randn(rows, device="cuda", dtype=torch.bfloat16) if has_bias else None
        workspace = StreamKWorkspace(torch.device("cuda"))
        split_k_workspace = SplitKWorkspace(torch.device("cuda"))
        for half in (0, 1):
            gemm = int4_gpu.prepare(replace(weight), bias, split_k_workspace, workspace, half)
            assert isinstance(gemm, int4_gpu.HopperInt4Linear)
            more = (64, 100, 129, 200, MAX_SMALL_M_ROWS, 300, 800) if half == 0 else ()
            check(gemm, *known, bias, gated=gated, all_rows=(1, 8, 17, *more))
        assert not workspace.arrived.any()

    @pytest.mark.parametrize(
        ("scales", "rows"),
        [(scales, rows) for scales, most in MAX_PAIRED_ROWS.items() for rows in ROW_SIZES if rows <= most],
    )
    @pytest.mark.parametrize("half", [0, 1])
    @pytest.mark.parametrize("is_plain", [True, False])
    def test_an_sm_holds_no_two_blocks_of_one_half(self, half: int, rows: int, scales: int, is_plain: bool) -> None:
        device = torch.device("cuda")
        variant = Variant(rows, 2, 1, scales, gated=not is_plain, has_bias=not is_plain, half=half)
        _, max_blocks = load_kernel(variant, "int4_gemm", device)
        assert max_blocks <= torch.cuda.get_device_properties(device).multi_processor_count

    @pytest.mark.parametrize("rows", [1, 16, 17])
    def test_gemms_of_both_halves_in_turn_are_right(self, rows: int) -> None:
        """A thread block reads its weights while the GEMM before it still computes its input."""
        weights = [random_matrix(4096, 4096, 128, gated=False) for _ in range(4)]
        workspace = StreamKWorkspace(torch.device("cuda"))
        gemms = [
            HopperInt4Gemm(weight, pack_stages(weight, scale_words(weight)), None, workspace, half=index % 2)
            for index, (weight, *_) in enumerate(weights)
        ]
        x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
        wanted = x.double()
        for _, rounded, exact in weights:
            wanted = wanted @ (exact if rows <= 16 else rounded).double().T
        for _ in range(20):
            out = x
            for gemm in gemms:
                out = gemm(out)
            assert (out.double() - wanted).norm() / wanted.norm() < 1e-2

    @pytest.mark.parametrize("gated", [False, True])
    @pytest.mark.parametrize("cluster", [1, 2, 4])
    @pytest.mark.parametrize("row_parts", [1, 2])
    @pytest.mark.parametrize(("rows", "columns", "block"), [(4096, 2048, 128), (1040, 1152, 32)])
    def test_stream_k_tilings_match_a_float64_reference(
        self, rows: int, columns: int, block: int, cluster: int, row_parts: int, gated: bool
    ) -> None:
        weight, *known = random_matrix(rows, columns, block, gated=gated)
        stages, workspace = pack_stages(weight, scale_words(weight)), StreamKWorkspace(torch.device("cuda"))

        def choose(num_rows: int, *sizes: int) -> GemmTiling:
            parts = row_parts if num_rows % 16 == 0 else 1
            return GemmTiling(128, cluster=cluster, row_parts=max(parts, -(-num_rows // 128)))

        gemm = HopperInt4Gemm(weight, stages, None, workspace, half=row_parts - 1, choose=choose)
        check(gemm, *known, None, gated=gated, all_rows=(1, 16, 33, 128, 144, MAX_SMALL_M_ROWS))
        assert not workspace.arrived.any()


def random_matrix(
    rows: int, columns: int, block: int | None, *, gated: bool
) -> tuple[Int4Weight, torch.Tensor, torch.Tensor]:
    """Return a random weight in bfloat16 on the GPU, and its values, [rows, columns], rounded to bfloat16 and exact."""
    weight = random_weight(rows, columns, block, gated=gated, dtype=torch.bfloat16, device=torch.device("cuda"))
    order = torch.cat([weight.rows_of(start, rows // 2) for start in (0, rows // 2)])
    exact = replace(weight, scales=weight.scales.double())
    rounded, unrounded = (each.dequantize(0, len(weight.codes))[order] for each in (weight, exact))
    return weight, rounded, unrounded


def check(
    gemm: int4_gpu.HopperInt4Linear | HopperInt4Gemm,
    rounded: torch.Tensor,
    exact: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    gated: bool,
    all_rows: tuple[int, ...],
) -> None:
    """Compare with float64. Each call must leave the workspace ready for the next."""
    columns = rounded.shape[1]
    for num_rows in all_rows:
        x = torch.randn(num_rows, columns + 8, device="cuda", dtype=torch.bfloat16)[:, :columns]
        wanted = reference(x, exact if num_rows <= 16 else rounded, bias, gated=gated)
        results = []
        for _ in range(3):
            torch.full_like(wanted, float("nan"), dtype=torch.bfloat16)  # the result likely gets this memory
            results.append(gemm(x))
        assert all(torch.equal(result, results[0]) for result in results)
        error = (results[0].double() - wanted).norm() / wanted.norm()
        assert error < 5e-3, (num_rows, float(error))
