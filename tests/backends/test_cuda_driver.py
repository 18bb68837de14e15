"""Arguments of CUDA kernels; needs no GPU."""

from __future__ import annotations

from ctypes import c_float, c_int, c_uint64

import pytest
import torch

from minisgl_backends.cuda.driver import TensorMap, kernel_parameters, mappable


def test_parameters_are_what_the_kernel_reads() -> None:
    x = torch.zeros(1)
    tensor_map = TensorMap.__new__(TensorMap)  # without a driver
    tensor_map.address = 64
    words = kernel_parameters((x, None, 7, -7, 0.1, -0.5, tensor_map, True))
    addresses = words[8:]
    types = c_uint64, c_uint64, c_int, c_int, c_float, c_float
    found = [each.from_address(address).value for each, address in zip(types, addresses, strict=False)]
    assert found == [x.data_ptr(), 0, 7, -7, c_float(0.1).value, -0.5]
    assert addresses[6] == 64
    assert c_int.from_address(addresses[7]).value == 1
    assert len(addresses) == 8


def test_an_argument_of_another_type_is_an_error() -> None:
    with pytest.raises(AttributeError):
        kernel_parameters(("7",))  # type: ignore[arg-type]


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
