"""Graphs of the CPU platform: replays on new inputs equal eager execution."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest
import torch

from minisgl_core.errors import MinisglError
from minisgl_core.platforms.cpu import CpuPlatform
from minisgl_core.platforms.cpu_graphs import call

WEIGHTS = [torch.randn(64, 64) / 8 for _ in range(4)]


def double(to: int, of: int) -> None:
    """Double 32 * 3 floats, given by address as to a C kernel."""
    target, source = ((ctypes.c_float * 96).from_address(address) for address in (to, of))
    target[:] = [2 * value for value in source]


def model(x: torch.Tensor, order: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Compute with views, several outputs, in-place operators, constants, allocations, and a function unknown to torch."""
    for weight in WEIGHTS:
        y = torch.softmax(x @ weight, -1) * x.sigmoid() + x
        best, where = y.topk(4)
        left, right = y[order].split(32, -1)
        doubled = torch.empty(3, 32)
        dense = right.contiguous()
        call(double, doubled.data_ptr(), dense.data_ptr())
        x = torch.cat((left, doubled), -1) - best.sum(-1, keepdim=True) * torch.tensor([0.1]) + where[:, :1]
        total.add_(x.mean())
    return x.view(3, 8, 8).transpose(1, 2).reshape(3, 64)


@pytest.mark.parametrize("is_inference", [True, False])
def test_replays_equal_eager_results(is_inference: bool) -> None:
    with torch.inference_mode(is_inference), torch.no_grad():
        x, order, total = torch.randn(3, 64), torch.arange(3), torch.zeros(1)
        graph, found = CpuPlatform().capture_graph(lambda: model(x, order, total))
        for _ in range(3):
            x.copy_(torch.randn(3, 64))
            order.copy_(torch.randperm(3))
            total.zero_()
            expected_total = torch.zeros(1)
            expected = model(x, order, expected_total)
            graph.replay()
            assert torch.equal(found, expected)
            assert torch.equal(total, expected_total)


def test_adjacent_calls_of_native_kernels_are_merged() -> None:
    done: list[object] = []

    def sequence(calls: Sequence[tuple[object, tuple[object, ...]]]) -> Callable[[], object]:
        return lambda: done.append([arguments for _, arguments in calls])

    def merged(*arguments: object) -> None: ...

    merged.sequence = sequence  # type: ignore[attr-defined]

    def code() -> None:
        call(merged, 1)
        call(merged, 2, 3)
        call(done.append, "other")
        call(merged)

    graph, _ = CpuPlatform().capture_graph(code)
    done.clear()
    for _ in range(2):
        graph.replay()
    assert done == [[(1,), (2, 3)], "other", [()]] * 2


def test_graphs_share_memory_of_freed_tensors() -> None:
    x = torch.randn(1000)

    def chain() -> torch.Tensor:
        y = x
        for _ in range(20):
            z = torch.empty(1000)
            call(int, y.data_ptr())
            y = z
        return y

    platform = CpuPlatform()
    graph, first = platform.capture_graph(chain)
    address = first.data_ptr()
    del first
    _, second = platform.capture_graph(chain, graph.pool())
    assert sum(map(len, graph.pool()._blocks.values())) == 2
    assert second.data_ptr() % 64 == address % 64 == 0


@pytest.mark.parametrize(
    "code", [lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: bool((x > 0).all())]
)
def test_code_that_reads_tensor_values_is_refused(code: Callable[[torch.Tensor], object]) -> None:
    def run() -> torch.Tensor:
        code(x)
        return x

    x = torch.randn(8)
    with pytest.raises(MinisglError, match="must not depend on values of tensors"):
        CpuPlatform().capture_graph(run)
    assert torch.equal(x[x > 0], x[x > 0])  # the capture has ended


def test_captures_do_not_import_the_torch_compiler() -> None:
    """torch._dynamo and SymPy would take 77 MB per scheduler process, and a second of the first decode step."""
    code = (
        "import sys, torch; from minisgl_core.platforms.cpu import CpuPlatform; "
        "graph, out = CpuPlatform(0).capture_graph(lambda: torch.empty(3).fill_(1) + 1, None); graph.replay(); "
        "assert out.tolist() == [2, 2, 2]; print('torch._dynamo' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
