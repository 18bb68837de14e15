"""A gated MLP's first half of many rows by gated.cu.

Shape legend: M rows of x, N outputs, K inputs; the matrix is [2 * N, K], gate above up.
"""

from __future__ import annotations

from functools import cache

import torch

from minisgl_backends.cuda.compiler import compiled_later, program
from minisgl_backends.cuda.cut import MAX_ROWS
from minisgl_backends.cuda.driver import Kernel, TensorMap
from minisgl_backends.cuda.products import DEPTH, SHARED_BYTES, THREADS, multiply, takes_matrix, takes_rows

_ROWS, _OUTPUTS, _STORED_ROWS = 128, 128, 64


def worthwhile(num_rows: int, num_outputs: int, num_inputs: int, num_processors: int) -> bool:
    """Whether it takes less time than cuBLAS and the activation, on an H200.

    The activation costs more of it the fewer inputs there are; what the tiles of the last turn leave idle is lost.

    Args:
        num_rows: M.
        num_outputs: N.
        num_inputs: K.
        num_processors: of the device.
    """
    if num_rows <= MAX_ROWS:
        return False
    pairs = num_processors // 2
    turns = -(-_tiles(num_rows, num_outputs) // pairs)
    filled = num_rows * num_outputs / (turns * pairs * 2 * _ROWS * _OUTPUTS)
    return filled > 1 - 160 / num_inputs


def _tiles(num_rows: int, num_outputs: int) -> int:
    """Of a pair of thread blocks."""
    return -(-num_rows // (2 * _ROWS)) * -(-num_outputs // _OUTPUTS)


def source() -> str:
    """The program."""
    return program("gated.cu", {}).replace("#include MULTIPLY", multiply(2 * _OUTPUTS))


@cache
def _kernel(device: torch.device) -> tuple[Kernel, int]:
    """And how many thread blocks the device holds."""
    with torch.cuda.device(device):
        cubin = compiled_later(source()).result()
        kernel = Kernel(cubin, "gated_product", num_threads=THREADS, shared_bytes=SHARED_BYTES, cluster=2)
        return kernel, kernel.most_blocks()


class GatedProduct:
    """``silu(x @ gate.T) * (x @ up.T)`` of many rows, rounded where torch rounds."""

    def __init__(self, weight: torch.Tensor) -> None:
        """Keep the matrix, one that `fits`, and begin to compile."""
        self._weight, self._num_outputs = weight, len(weight) // 2
        self._weight_map = TensorMap(weight, (_OUTPUTS, DEPTH))
        self._processors = torch.cuda.get_device_properties(weight.device).multi_processor_count
        compiled_later(source())

    def takes(self, x: torch.Tensor) -> bool:
        """Whether x, with two dimensions, is [M, K] of a kind that the kernel reads, and it is `worthwhile`."""
        sizes = len(x), self._num_outputs, self._weight.shape[1]
        return worthwhile(*sizes, self._processors) and takes_rows(x, self._weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, K] to [M, N]."""
        kernel, most = _kernel(x.device)
        num_rows, num_inputs = x.shape
        tiles = _tiles(num_rows, self._num_outputs)
        out = torch.empty(num_rows, self._num_outputs, dtype=x.dtype, device=x.device)
        maps = self._weight_map, TensorMap(x, (_ROWS, DEPTH)), TensorMap(out, (_STORED_ROWS, 64))
        kernel.launch(min(most, 2 * tiles), (*maps, num_rows, self._num_outputs, num_inputs))
        return out


def fits(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether `GatedProduct` takes this matrix: no biases."""
    return bias is None and takes_matrix(weight) and len(weight) % 16 == 0 and weight.shape[1] >= 2 * DEPTH
