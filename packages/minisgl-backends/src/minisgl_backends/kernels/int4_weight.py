"""Packed 4-bit weights, the layout that all checkpoint formats are repacked to once, and their GEMM in torch.

A weight is ``(code - zero) * scale``, rounded to the model's dtype. The same values are used by every kernel and for any number
of rows, except that ``cuda/int4_gemm.cu`` does not round them for up to 16 rows.

Shape legend: N outputs, K inputs, T tiles of 64 outputs, C chunks of 128 inputs, B blocks of inputs that share a scale.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from minisgl_backends.kernels.packed_matrix import TILE, TiledWeight
from minisgl_core.contracts.ops.norm import silu_and_mul

if TYPE_CHECKING:
    from minisgl_core.contracts.ops import LinearOp

SYMMETRIC_ZERO = 8
"""Zero point of weights without stored zero points."""
SUB = 32
"""Stride in inputs between consecutive codes of an element; see `Packing.sub`."""
_CHUNK = 4 * SUB
_WEIGHTS_PER_PANEL = 1 << 22
"""Number of weights that are dequantized at once."""


@dataclass(slots=True, kw_only=True)
class Int4Weight(TiledWeight):
    """Weight of a linear layer on this rank.

    Attributes:
        codes: int16 [T, C, 64, 32]; bits 4 * i to 4 * i + 3 of element j are the code of the chunk's input ``i * 32 + j``.
        scales: [B, T * 64] in the model's dtype; 0 for padding.
        zeros: uint8 [B, T * 64], or None if all zero points are 8.
        block: inputs per scale, a multiple of 32.
    """

    scales: torch.Tensor
    zeros: torch.Tensor | None
    block: int

    @classmethod
    def empty(
        cls,
        num_outputs: int,
        num_inputs: int,
        block: int | None,
        dtype: torch.dtype,
        device: torch.device,
        *,
        order: torch.Tensor | None = None,
        has_zeros: bool = False,
        gated: bool = False,
    ) -> "Int4Weight":
        """Allocate a weight of zeros.

        Args:
            num_outputs: N.
            num_inputs: K.
            block: inputs per scale, a multiple of 32; None for all.
            dtype: dtype of the model.
            device: device of all tensors.
            order: see `TiledWeight`.
            has_zeros: allocate zero points.
            gated: see `TiledWeight`.
        """
        chunks = max(1, -(-num_inputs // _CHUNK))
        block = block or chunks * _CHUNK
        halves = 1 + gated
        tiles = -(-num_outputs // halves // TILE) * halves
        codes = torch.zeros(tiles, chunks, TILE, SUB, dtype=torch.int16, device=device)
        shape = -(-chunks * _CHUNK // block), tiles * TILE
        zeros = torch.zeros(shape, dtype=torch.uint8, device=device) if has_zeros else None
        scales = torch.zeros(shape, dtype=dtype, device=device)
        return cls(
            codes=codes,
            scales=scales,
            zeros=zeros,
            block=block,
            num_inputs=num_inputs,
            num_outputs=num_outputs,
            order=order,
            gated=gated,
        )

    def store(self, rows: torch.Tensor, codes: torch.Tensor) -> None:
        """Store the codes of some rows, uint8 [rows, K] with values up to 15."""
        chunks = self.codes.shape[1]
        codes = F.pad(codes, (0, chunks * _CHUNK - codes.shape[1])).view(len(codes), chunks, 4, SUB)
        low, high = (codes[:, :, i] | codes[:, :, i + 1] << 4 for i in (0, 2))
        self.codes[rows // TILE, :, rows % TILE] = torch.stack((low, high), -1).view(torch.int16).squeeze(-1)

    def dequantize(self, start: int, stop: int) -> torch.Tensor:
        """Return the weights of the tiles from `start` to `stop`, in the model's dtype [rows, K]."""
        codes = self.codes[start:stop].transpose(1, 2).flatten(0, 1)
        codes = torch.stack([codes >> shift & 15 for shift in (0, 4, 8, 12)], 2).flatten(1)[:, : self.num_inputs]
        column = slice(start * TILE, stop * TILE)
        values, scales = codes.to(self.scales.dtype), self.scales[:, column].t()
        if self.zeros is None:
            values -= SYMMETRIC_ZERO
        else:
            values -= self._expand_blocks(self.zeros[:, column].t()).to(values.dtype)
        return values.mul_(self._expand_blocks(scales))

    def _expand_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks.repeat_interleave(self.block, 1)[:, : self.num_inputs]

    def inputs(self, x: torch.Tensor) -> torch.Tensor:
        """Return the K columns of x that the codes are for."""
        return x[..., : self.num_inputs] if self.order is None else x.index_select(-1, self.order)


def quantize_groups(weight: torch.Tensor, group: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to 4 bits, rounded to nearest, with one scale per group and the zero point 8.

    Args:
        weight: float32 [N, K].
        group: inputs per scale, a divisor of K.
        dtype: dtype of the scales.

    Returns:
        Codes, uint8 [N, K], with the zero point 8, and scales, [N, K / group].
    """
    groups = weight.view(len(weight), -1, group)
    # Rounding to -8 to 7 errs by half a step at most between -8.5 and 7.5, so steps of amax / 7.5 suffice for -amax to amax.
    scales = (groups.abs().amax(2) / 7.5).to(dtype)
    scales.masked_fill_(scales == 0, 1)
    codes = (groups / scales.float()[..., None]).round_().clamp_(-8, 7).flatten(1)
    return (codes + SYMMETRIC_ZERO).to(torch.uint8), scales


def torch_int4_linear(weight: Int4Weight, bias: torch.Tensor | None) -> "LinearOp":
    """Return ``x -> x @ weight.T + bias``, with the activation if the weight is gated.

    Panels of the weight are dequantized in each call: for processors without a kernel, and as the reference of kernels.
    """
    tiles, step = len(weight.codes), max(1, _WEIGHTS_PER_PANEL // (TILE * max(weight.num_inputs, 1)))

    def linear(x: torch.Tensor) -> torch.Tensor:
        x = weight.inputs(x)
        stored = x.new_empty((*x.shape[:-1], tiles * TILE))
        for start in range(0, tiles, step):
            rows = slice(start * TILE, (start + step) * TILE)
            stored[..., rows] = F.linear(x, weight.dequantize(start, min(start + step, tiles)))
        out = weight.outputs(stored)
        out = out if bias is None else out + bias
        return silu_and_mul(out) if weight.gated else out

    return linear
