"""GEMM of 16-bit activations and 4-bit integers with zero points (W4A16), by the kernel of packed matrices."""

import math

import torch

from minisgl_backends.kernels.int4_weight import SUB, SYMMETRIC_ZERO, Int4Weight
from minisgl_backends.kernels.packed_gemm import PackedGemm
from minisgl_backends.kernels.packed_matrix import PackedMatrix, Packing
from minisgl_backends.kernels.packed_tiling import PackedTiling
from minisgl_backends.kernels.split_k import SplitKWorkspace


def scale_words(weight: Int4Weight) -> torch.Tensor:
    """Return words with a scale in the low and ``-(M + zero)`` in the high 16 bits, both in the model's dtype, int32 [B, T * 64].

    M is the float whose last mantissa bit is worth 1: 128 in bfloat16, 1024 in float16. A word of 4 bytes is the least that
    asynchronous copies to shared memory take.
    """
    dtype = weight.scales.dtype
    base = 128 if dtype == torch.bfloat16 else 1024
    zeros = torch.full_like(weight.scales, SYMMETRIC_ZERO) if weight.zeros is None else weight.zeros
    return torch.stack((weight.scales, -(zeros.to(dtype) + base)), -1).view(torch.int32).squeeze(-1)


class Int4Gemm(PackedGemm):
    """``x @ weight.T + bias``; for a gated MLP, ``silu(gate) * up`` of the result's halves."""

    def __init__(
        self,
        weight: Int4Weight,
        bias: torch.Tensor | None,
        workspace: SplitKWorkspace,
        *,
        tiling: PackedTiling | None = None,
    ) -> None:
        """Prepare a weight in bfloat16 or float16, whose scales are released; see `PackedGemm`."""
        words, block = scale_words(weight), weight.block
        packing = Packing("int4", low=4, high=0, sub=SUB, block=block)
        if not packing.is_aligned:  # such as blocks of 96 inputs: their scales are repeated for smaller blocks
            packing = Packing("int4", low=4, high=0, sub=SUB, block=math.gcd(block, packing.chunk))
            words = words.repeat_interleave(block // packing.block, 0)
        matrix = PackedMatrix(
            codes=weight.codes,
            words=words,
            packing=packing,
            num_inputs=weight.num_inputs,
            num_outputs=weight.num_outputs,
            order=weight.order,
            gated=weight.gated,
        )
        super().__init__(matrix, bias, workspace, weight.scales.dtype, tiling=tiling)
        weight.scales, weight.zeros = weight.scales.new_empty(0), None
