"""Products in CUDA C++: how they are cut, that each variant compiles, and on a Hopper GPU that they are right."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from compile_cuda import compile_by_nvcc
from hopper_reference import HAS_HOPPER, reference
from hypothesis import given
from hypothesis import strategies as st

from minisgl_backends.cuda.cut import MAX_ROWS, cut, worthwhile_rows
from minisgl_backends.cuda.product import HopperProduct, StreamScratch, Variant, fits
from minisgl_backends.cuda.products import DEPTH
from minisgl_backends.ops.hopper import HopperOps
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


@given(st.integers(1, MAX_ROWS), st.integers(1, 20_000).map(lambda n: 8 * n), st.integers(1, 400), st.integers(78, 160))
def test_a_cut_gives_every_thread_block_something(rows: int, outputs: int, depth: int, processors: int) -> None:
    way = cut(rows, outputs, depth * DEPTH, processors)
    tiles = -(-outputs // way.outputs)
    assert way.outputs in (64, 128)
    assert 1 <= way.cluster * way.splits * way.row_parts <= 8  # what CUDA promises of a cluster
    assert way.splits <= depth
    assert way.cluster == 1 or way.splits == way.row_parts == 1
    # Clusters of a tile are all there at once.
    assert way.splits == 1 or tiles * way.splits * way.row_parts <= processors
    assert way.row_multiple == way.row_parts * (16 if way.outputs == 64 else 8)
    assert way.num_blocks is None or 1 <= way.num_blocks <= processors
    # No tile is cut by another one's border.
    assert way.num_blocks is None or way.num_blocks % (tiles * way.row_parts) == 0


def test_large_matrices_are_left_to_cublas_sooner() -> None:
    assert worthwhile_rows(6144, 1024, gated=True) == MAX_ROWS
    assert worthwhile_rows(34816, 5120, gated=False) < worthwhile_rows(34816, 5120, gated=True) < MAX_ROWS


@pytest.mark.parametrize(
    ("rows", "row_parts"), [(rows, parts) for parts in (1, 2) for rows in range(16 * parts, MAX_ROWS + 1, 16 * parts)]
)
@pytest.mark.parametrize("outputs", [64, 128])
def test_a_ring_has_room_for_what_is_on_its_way_and_for_sums_that_are_shared(
    rows: int, row_parts: int, outputs: int
) -> None:
    variant = Variant(rows, outputs, 1, 3, row_parts, gated=False, has_bias=False)
    assert variant.stages >= 4
    ring = variant.stages * (outputs + variant.block_rows) * DEPTH * 2
    eighths = (variant.block_rows // 2 if outputs == 64 else variant.block_rows) // 8
    for splits in range(2, 8 // row_parts + 1):
        most = -(-eighths // splits)
        waiting = most * 8 * (2 * outputs + 16) * (2 if outputs == 64 else 1)
        assert splits * most * 256 * 16 + waiting <= ring


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize(
    "variant",
    [
        Variant(MAX_ROWS, 128, 2, 1, 1, gated=True, has_bias=False),
        Variant(MAX_ROWS, 64, 1, 6, 1, gated=False, has_bias=False),
        Variant(232, 128, 2, 1, 1, gated=True, has_bias=False),
        Variant(160, 64, 1, 1, 1, gated=True, has_bias=True),
        Variant(96, 128, 1, 1, 1, gated=False, has_bias=True),
        Variant(16, 64, 1, 1, 1, gated=True, has_bias=True),
        Variant(128, 64, 1, 3, 1, gated=False, has_bias=True),
        Variant(160, 64, 1, 2, 2, gated=False, has_bias=False),
        Variant(MAX_ROWS, 64, 1, 3, 2, gated=False, has_bias=True),
        Variant(MAX_ROWS, 64, 1, 1, 2, gated=True, has_bias=False),
    ],
)
def test_a_variant_compiles_without_spilling(variant: Variant, tmp_path: Path) -> None:
    said = compile_by_nvcc(variant.source(), tmp_path)
    assert "0 bytes spill stores" in said
    assert "serialized" not in said  # what ptxas says where wgmma waits for each other


def test_it_says_what_it_needs() -> None:
    assert HopperOps.unsupported(torch.device("cpu"), torch.bfloat16) == ["it is for Hopper GPUs, not for cpu"]


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
class TestOnHopper:
    """Against float64, on memory that was NaN."""

    @pytest.mark.parametrize(("rows", "inputs", "gated", "has_bias"), MATRICES)
    def test_products(self, rows: int, inputs: int, gated: bool, has_bias: bool) -> None:
        device = torch.device("cuda")
        weight = torch.randn(rows, inputs, device=device, dtype=torch.bfloat16) / inputs**0.5
        bias = torch.randn(rows, device=device, dtype=torch.bfloat16) if has_bias else None
        scratch = StreamScratch(device)
        assert fits(weight, bias, gated=gated)
        sizes = (16, 32, 48, 64, 96, 128, 152, 160, 192, 224, MAX_ROWS)
        product = HopperProduct(weight, bias, scratch, gated=gated, row_sizes=sizes)
        for num_rows in (1, 7, 16, 17, 33, 64, 90, 128, 145, 160, 190, 224, MAX_ROWS):
            x = torch.randn(num_rows, inputs + 8, device=device, dtype=torch.bfloat16)[:, :inputs]
            assert product.takes(x)
            wanted = reference(x, weight, bias, gated=gated)
            results = []
            for _ in range(3):  # what a product leaves behind is fit for the next
                torch.full_like(wanted, float("nan"), dtype=torch.bfloat16)  # likely the memory of the result
                results.append(product(x))
            assert all(torch.equal(result, results[0]) for result in results)
            error = (results[0].double() - wanted).norm() / wanted.norm()
            assert error < 5e-3, (num_rows, float(error))
        assert not scratch.arrived.any()

    @pytest.mark.parametrize(("num_rows", "hidden"), [(72, 2048), (200, 1024)])
    def test_a_chain_in_a_graph_equals_the_same_without_overlap(self, num_rows: int, hidden: int) -> None:
        device, dtype = torch.device("cuda"), torch.bfloat16
        ops = HopperOps(device, dtype)
        gain = torch.rand(hidden, device=device, dtype=dtype)
        matrices = [
            torch.randn(*shape, device=device, dtype=dtype) * hidden**-0.5
            for shape in ((6 * hidden, hidden), (hidden, 3 * hidden))
        ]
        gate_up, down = ops.prepare_gated(matrices[0], None), ops.prepare_linear(matrices[1], None)
        x = torch.randn(num_rows, hidden, device=device, dtype=dtype)

        def run(*, apart: bool) -> torch.Tensor:
            between = torch.cuda.synchronize if apart else lambda: None
            hidden, residual = x.clone(), torch.zeros_like(x)
            for _ in range(20):
                hidden, residual = ops.add_rms_norm(hidden, residual, gain, 1e-6)
                between()
                hidden = gate_up(hidden)
                between()
                hidden = down(hidden)
                between()
            return hidden

        wanted = run(apart=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run(apart=False)
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
