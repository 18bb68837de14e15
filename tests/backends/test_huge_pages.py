"""Memory of quantized weights in huge pages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from minisgl_backends.native.huge_pages import HugePages

MIB = 1 << 20

if sys.platform != "linux":
    pytest.skip("the C kernels run on Linux", allow_module_level=True)


def anonymous() -> int:
    """Return the number of bytes of anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10


def test_tensors_are_zero_aligned_and_disjoint() -> None:
    """Small tensors share mappings, and large ones have their own."""
    pages = HugePages()
    tensors = [pages.zeros(size) for size in (0, 1, 65, 7 * MIB, 8 * MIB, 8 * MIB + 1, 3 * MIB) * 4]
    for value, each in enumerate(tensors):
        assert each.dtype == torch.uint8
        assert not each.any()
        assert each.data_ptr() % 64 == 0
        each.fill_(value)
    assert all(bool((each == value).all()) for value, each in enumerate(tensors))


@pytest.mark.parametrize("size", [MIB + 8, 35 * MIB + 8])
def test_memory_is_freed_with_the_last_tensor(size: int) -> None:
    """The process grows by little more than the tensors' bytes."""
    pages, before = HugePages(), anonymous()
    tensors = [pages.zeros(size).fill_(1) for _ in range(70 * MIB // size)]
    assert len(tensors) * size < anonymous() - before < len(tensors) * size + 6 * MIB
    assert not pages.zeros(size).any()  # `sum` would leave the heap larger by a copy in int64
    tensors.clear()
    assert anonymous() - before < 6 * MIB
