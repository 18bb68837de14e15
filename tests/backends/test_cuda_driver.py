"""Arguments of CUDA kernels; needs no GPU."""

from __future__ import annotations

import ctypes

import pytest
import torch

from minisgl_backends.cuda.driver import c_values, mappable


def test_arguments_have_the_size_that_the_kernel_reads() -> None:
    x = torch.zeros(1)
    values = c_values((x, None, 7, 0.5))
    assert [value.value for value in values] == [x.data_ptr(), 0, 7, 0.5]
    assert [ctypes.sizeof(value) for value in values] == [8, 8, 4, 4]


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("width", [48, 52])
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_tensors_that_tma_cannot_map_are_copied(num_rows: int, width: int, offset: int) -> None:
    """Examples are a row of a wider tensor and a misaligned contiguous tensor, which `contiguous` does not copy."""
    memory = torch.arange(offset + num_rows * width).bfloat16()
    x = memory[offset:].view(num_rows, width)[:, :48]
    found = mappable(x)
    assert torch.equal(found, x)
    assert found.data_ptr() % 16 == 0
    assert [stride * found.element_size() % 16 for stride in found.stride()] == [0, 2]
    assert (found is x) == (width == 48 and offset != 1)
