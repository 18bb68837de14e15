"""Packed 4-bit weights of experts in torch; `ExpertWeights` describes them."""

import torch

BLOCK = 32
"""Inputs per scale of MXFP4. Rows of all packed weights are padded to a multiple of it."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return the weights of one expert in `dtype`, [N, K].

    Args:
        codes: uint8 [N, K / 2].
        scales: [N, G]; uint8 (e8m0) for MXFP4.
        zeros: zero points, uint8 [N, G]; None if all are 8.
        dtype: dtype of the model.
    """
    values = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    size = values.shape[1] // scales.shape[1]
    if scales.dtype == torch.uint8:
        table = torch.tensor([*_E2M1, *(-each for each in _E2M1)], device=codes.device)
        factors = scales.view(torch.float8_e8m0fnu).float().repeat_interleave(size, 1)
        return (table[values.int()] * factors).to(dtype)
    wide = values.to(scales.dtype) - (8 if zeros is None else zeros.to(scales.dtype).repeat_interleave(size, 1))
    return wide.mul_(scales.repeat_interleave(size, 1)).to(dtype)


def pack(codes: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """Return codes of 4 bits, uint8 [N, K], two per byte and padded with zeros: uint8 [N, num_bytes]."""
    codes = torch.nn.functional.pad(codes, (0, 2 * num_bytes - codes.shape[1]))
    return codes[:, 0::2] | codes[:, 1::2] << 4
