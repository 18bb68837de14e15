"""Launch of gated_gemm.cu: a gated MLP's gate and up GEMM with fused activation, for many rows.

Shape legend: M rows of x, N outputs, K inputs; the matrix is [2 * N, K], gate before up.
"""

from functools import cache

import torch

from minisgl_backends.cuda.compiler import compile_async, program
from minisgl_backends.cuda.driver import Kernel, TensorMap
from minisgl_backends.cuda.gemm_common import (
    BLOCK_K,
    SHARED_BYTES,
    THREADS,
    can_load_input,
    can_load_weight,
    wgmma_source,
)
from minisgl_backends.cuda.gemm_tiling import MAX_SMALL_M_ROWS

_ROWS, _OUTPUTS = 128, 128
"""Rows of x and outputs per tile of a thread block; ROWS and OUTPUTS of gated_gemm.cu."""
_STORED_ROWS = 64
"""Rows of a TMA store: those of a warpgroup."""


def worthwhile(num_rows: int, num_outputs: int, num_inputs: int, num_sms: int) -> bool:
    """Return True if the kernel is faster than cuBLAS and a separate activation, on an H200.

    The fewer inputs there are, the larger is the activation's part of the time. Idle SMs in the last wave cost time (wave
    quantization). The factor 160 is fitted to measurements of `scripts/tune_small_m_gemm.py --gated`.
    """
    if num_rows <= MAX_SMALL_M_ROWS:
        return False
    pairs = num_sms // 2
    waves = -(-_tiles(num_rows, num_outputs) // pairs)
    utilization = num_rows * num_outputs / (waves * pairs * 2 * _ROWS * _OUTPUTS)
    return utilization > 1 - 160 / num_inputs


def _tiles(num_rows: int, num_outputs: int) -> int:
    """Return the number of tiles, each of a pair of thread blocks."""
    return -(-num_rows // (2 * _ROWS)) * -(-num_outputs // _OUTPUTS)


def source() -> str:
    """Return the program's source."""
    return program("gated_gemm.cu", {}, wgmma_source(2 * _OUTPUTS))


@cache
def _kernel(device: torch.device) -> tuple[Kernel, int]:
    """Return the kernel and the number of thread blocks that the device holds."""
    with torch.cuda.device(device):
        cubin = compile_async(source()).result()
        kernel = Kernel(cubin, "gated_gemm", num_threads=THREADS, shared_bytes=SHARED_BYTES, cluster=2)
        return kernel, kernel.max_resident_blocks()


class HopperGatedGemm:
    """``silu(x @ gate.T) * (x @ up.T)`` of many rows, rounded where torch rounds."""

    def __init__(self, weight: torch.Tensor) -> None:
        """Prepare a weight matrix for which `supports_weight` is True, and start compiling."""
        self._weight, self._num_outputs = weight, len(weight) // 2
        self._weight_map = TensorMap(weight, (_OUTPUTS, BLOCK_K))
        self._num_sms = torch.cuda.get_device_properties(weight.device).multi_processor_count
        compile_async(source())

    def supports_input(self, x: torch.Tensor) -> bool:
        """Return True if the kernel supports x, with two dimensions, and is `worthwhile`."""
        sizes = len(x), self._num_outputs, self._weight.shape[1]
        return worthwhile(*sizes, self._num_sms) and can_load_input(x, self._weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [M, N] from x [M, K]."""
        kernel, max_blocks = _kernel(x.device)
        num_rows, num_inputs = x.shape
        tiles = _tiles(num_rows, self._num_outputs)
        out = torch.empty(num_rows, self._num_outputs, dtype=x.dtype, device=x.device)
        maps = self._weight_map, TensorMap(x, (_ROWS, BLOCK_K)), TensorMap(out, (_STORED_ROWS, 64))
        kernel.launch(min(max_blocks, 2 * tiles), (*maps, num_rows, self._num_outputs, num_inputs))
        return out


def supports_weight(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Return True if `HopperGatedGemm` supports this weight; a bias is not supported."""
    return (
        bias is None
        and can_load_weight(weight, torch.bfloat16)
        and len(weight) % 16 == 0
        and weight.shape[1] >= 2 * BLOCK_K
    )
