from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_backends.moe.tiles import choose_block_size
from minisgl_backends.moe.torch_kernel import TorchMoe
from minisgl_backends.moe.triton_kernel import TritonMoe
from minisgl_core.contracts.moe import MoeSpec
from minisgl_core.testing.moe_kit import MoeKernelTests
from minisgl_core.utils.fp8 import FP8

if TYPE_CHECKING:
    from minisgl_backends.moe.sorted_blocks import SortedBlocks
    from minisgl_core.testing.moe_cases import Shape

pytestmark = pytest.mark.slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class TestTorch(MoeKernelTests):
    provider = TorchMoe


class TestTriton(MoeKernelTests):
    """Compiled on a GPU and interpreted elsewhere, there without float16 and the largest FP8 shapes, which take a minute each."""

    provider = TritonMoe
    device = DEVICE.type
    dtypes = MoeKernelTests.dtypes if DEVICE.type == "cuda" else (torch.float32, torch.bfloat16)

    def run(self, spec: MoeSpec, shape: Shape, routing: str = "uniform") -> None:
        if DEVICE.type == "cpu" and spec.weight_dtype == FP8 and shape[0] > 33:
            pytest.skip("takes too long in Triton's interpreter")
        super().run(spec, shape, routing)

    def variants(self, shape: Shape, **changes: Any) -> Iterator[MoeSpec]:
        for spec in super().variants(shape, **changes):
            if DEVICE.type == "cuda" or spec.dtype == torch.float32 or (spec.has_bias and spec.swiglu_limit):
                yield spec


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
class TestTorchOnCuda(MoeKernelTests):
    provider = TorchMoe
    device = "cuda"


@settings(max_examples=30)
@given(data=st.data())
def test_each_row_is_in_one_block_of_its_expert(data: st.DataObject) -> None:
    from minisgl_backends.moe.sorted_blocks import sort_into_blocks

    num_experts = data.draw(st.integers(1, 9))
    top_k = data.draw(st.integers(1, min(4, num_experts)))
    block_size = data.draw(st.sampled_from([1, 4, 16]))
    tokens = st.lists(st.permutations(range(num_experts)).map(lambda experts: experts[:top_k]), min_size=1, max_size=40)
    ids = torch.tensor(data.draw(tokens), device=DEVICE)
    check_blocks(sort_into_blocks(ids, num_experts, block_size), ids, num_experts, block_size)


@pytest.mark.parametrize("columns", [7, 1500])
def test_columns_are_gathered_in_each_experts_order(columns: int) -> None:
    from minisgl_backends.kernels import gather_columns as triton_version
    from minisgl_backends.quantization import int4_experts

    x = torch.randn(5, columns + 3, device=DEVICE)[:, :columns]
    orders = torch.stack([torch.randperm(columns, device=DEVICE) for _ in range(4)]).int()
    ids = torch.tensor([[0, 3], [3, 1], [2, 0], [1, 0], [3, 2]], device=DEVICE)
    expected = torch.stack([x[token, orders[expert].long()] for token in range(5) for expert in ids[token]])
    for module in (triton_version, int4_experts):
        assert torch.equal(module.gather_columns(x, orders, ids), expected)


def test_blocks_of_more_rows_than_a_program_reads() -> None:
    from minisgl_backends.moe.sorted_blocks import sort_into_blocks

    ids = torch.rand(1500, 7, generator=torch.Generator().manual_seed(0)).topk(3)[1].to(DEVICE)
    check_blocks(sort_into_blocks(ids, 7, 16), ids, 7, 16)


def check_blocks(blocks: SortedBlocks, ids: torch.Tensor, num_experts: int, block_size: int) -> None:
    rows, num_rows = blocks.rows.view(-1, block_size).tolist(), ids.numel()
    used = [
        (block, expert) for block, expert in zip(rows, blocks.experts.tolist(), strict=True) if expert < num_experts
    ]
    assert set(blocks.experts[len(used) :].tolist()) <= {num_experts}, "unused blocks are at the end"
    assert sorted(row for block, _ in used for row in block if row < num_rows) == list(range(num_rows))
    for block, expert in used:
        real = [row for row in block if row < num_rows]
        assert real, "a block in use is empty"
        assert {int(ids.flatten()[row]) for row in real} == {expert}
        assert block == sorted(real) + [num_rows] * (block_size - len(real))


@pytest.mark.parametrize(
    ("num_rows", "num_experts", "block_size"),
    [(1, 128, 16), (128 * 10, 128, 16), (128 * 16, 128, 32), (128 * 22, 128, 64), (10**6, 8, 128)],
)
def test_block_sizes_follow_the_rows_per_expert(num_rows: int, num_experts: int, block_size: int) -> None:
    assert choose_block_size(num_rows, num_experts) == block_size
    packed = choose_block_size(num_rows, num_experts, is_packed=True)
    assert packed == (16 if num_rows <= 16 * num_experts else block_size)


def test_triton_reports_why_it_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    spec = MoeSpec(4, 2, 16, 16, torch.float64, torch.device("cpu"))
    device, dtype = TritonMoe.unsupported(spec)
    assert device == "it needs an NVIDIA GPU, not cpu"
    assert "float64" in dtype
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'minisgl-backends[triton]'" in TritonMoe.unsupported(spec)[0]


def test_triton_supports_fp8_only_on_gpus_with_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    spec = MoeSpec(4, 2, 16, 16, torch.bfloat16, torch.device("cuda"), weight_dtype=FP8)
    [reason] = TritonMoe.unsupported(spec)
    assert "8.9 or later, and this GPU has 8.0" in reason
    assert TritonMoe.unsupported(replace(spec, weight_dtype=None)) == []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert TritonMoe.unsupported(spec) == []


def test_triton_refuses_gpus_before_ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    [reason] = TritonMoe.unsupported(MoeSpec(4, 2, 16, 16, torch.bfloat16, torch.device("cuda")))
    assert "8.0 or later, and this GPU has 7.5" in reason


def test_unsupported_imports_no_triton() -> None:
    code = """
import sys, torch
from minisgl_backends.moe.triton_kernel import TritonMoe
from minisgl_core.contracts.moe import MoeSpec
TritonMoe.unsupported(MoeSpec(4, 2, 16, 16, torch.float32, torch.device("cpu")))
assert "triton" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
