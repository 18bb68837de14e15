"""Replays of captured C kernels, which run in sequence without Python, equal eager calls on the same inputs."""

from __future__ import annotations

import pytest
import torch

from minisgl_backends.native import library
from minisgl_core.platforms.cpu import CpuPlatform

if reasons := library.unsupported(torch.device("cpu"), torch.float32):
    pytest.skip("; ".join(reasons), allow_module_level=True)


def test_replays_of_c_kernels_equal_eager_results() -> None:
    """Arguments are pointers, null pointers, integers and floats, more of each type than a processor has registers for."""
    kernels = library.load(torch.float32)
    x, weight, table = torch.randn(3, 128), torch.randn(64), torch.randn(3, 64)
    k_pages, v_pages = torch.randn(2, 2, 16, 32), torch.randn(2, 2, 16, 32)
    pages, rows, lens = (
        torch.tensor([[1, 0]] * 3, dtype=torch.int32),
        torch.arange(3).int(),
        torch.tensor([32, 5, 17]).int(),
    )

    def run() -> torch.Tensor:
        gated, normed = torch.empty(3, 64), torch.empty(3, 64)
        kernels.silu_and_mul(gated.data_ptr(), x.data_ptr(), 3, 64)
        kernels.rms_norm(normed.data_ptr(), gated.data_ptr(), 64, weight.data_ptr(), 3, 64, 1e-3)
        kernels.qk_norm_rope(
            *(normed.data_ptr(), 64, 1, normed.data_ptr() + 128, 64, 1, table.data_ptr(), table.data_ptr()),
            *(3, 32, 16, None, None, 0.0),
        )
        total = normed + gated
        out = torch.empty(3, 64)
        kernels.decode(
            *(out.data_ptr(), total.data_ptr(), 64, k_pages.data_ptr(), v_pages.data_ptr(), pages.data_ptr(), 2),
            *(rows.data_ptr(), lens.data_ptr(), 3, 2, 1, 32, 16, 0.3, 7, 2.5, None),
        )
        return out

    graph, found = CpuPlatform().capture_graph(run)
    for _ in range(2):
        x.normal_()
        k_pages.normal_()
        graph.replay()
        assert torch.equal(found, run())
    assert len(graph.calls) == 3  # the kernels before the sum, the sum, and the kernel after it
