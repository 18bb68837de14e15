"""GEMMs of 4-bit integers on GPUs: in CUDA C++ for Hopper, otherwise in Triton."""

import torch

from minisgl_backends.cuda import int4_gemm
from minisgl_backends.cuda.small_m_gemm import StreamKWorkspace
from minisgl_backends.kernels.int4_gemm import Int4Gemm, scale_words
from minisgl_backends.kernels.int4_stages import dequantize_stages, pack_stages
from minisgl_backends.kernels.int4_weight import Int4Weight
from minisgl_backends.kernels.packed_gemm import matmul_by_panels
from minisgl_backends.kernels.split_k import SplitKWorkspace

_MAX_HOPPER_TOKENS = 768
"""Largest number of tokens in a step for which the kernel for Hopper is used.

An estimate, which docs/performance-notes.md derives from measurements with 256 tokens: more were not measured.
"""


class HopperInt4Linear:
    """`Int4Gemm` for Hopper, with a kernel in CUDA C++ for small numbers of tokens."""

    def __init__(self, weight: Int4Weight, bias: torch.Tensor | None, workspace: StreamKWorkspace, half: int) -> None:
        """Prepare a weight for which `int4_gemm.supports_weight` is True, whose tensors are released; see `prepare`."""
        self._weight, self._bias, self._num_tiles = weight, bias, len(weight.codes)
        self._stages = pack_stages(weight, scale_words(weight))
        self._small_m = int4_gemm.HopperInt4Gemm(weight, self._stages, bias, workspace, half=half)
        weight.codes, weight.scales, weight.zeros = weight.codes.new_empty(0), weight.scales.new_empty(0), None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., N] from x [..., K]; a row of x is a token."""
        if x.dim() != 2:
            out = self(x.reshape(-1, x.shape[-1]))
            return out.view(*x.shape[:-1], out.shape[-1])
        if self._weight.order is not None:
            x = x.index_select(1, self._weight.order)
        if len(x) <= _MAX_HOPPER_TOKENS:
            return self._small_m(x)
        return matmul_by_panels(x, self._weight, self._num_tiles, self._bias, self._dequantize)

    def _dequantize(self, out: torch.Tensor, first_tile: int) -> None:
        dequantize_stages(self._stages, first_tile, out, gated=self._weight.gated)


def prepare(
    weight: Int4Weight,
    bias: torch.Tensor | None,
    workspace: SplitKWorkspace,
    stream_k_workspace: StreamKWorkspace | None,
    half: int = 0,
) -> Int4Gemm | HopperInt4Linear:
    """Return the GEMM of a weight.

    Args:
        weight: packed weight.
        bias: one value per output, or None.
        workspace: the CUDA stream's workspace for Triton's kernel.
        stream_k_workspace: its workspace for the kernel for Hopper, or None on another GPU.
        half: 0 and 1 in turn for GEMMs that run one after the other; see `int4_gemm.HopperInt4Gemm`.
    """
    if stream_k_workspace is not None and int4_gemm.supports_weight(weight):
        return HopperInt4Linear(weight, bias, stream_k_workspace, half)
    return Int4Gemm(weight, bias, workspace)
