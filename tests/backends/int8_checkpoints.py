"""Packers of 8-bit integer checkpoints, from compressed-tensors' definition of int-quantized."""

from __future__ import annotations

from functools import partial

import torch

from minisgl_core.testing.packed_checkpoint import Packed, PackedCheckpoint


def pack(weight: torch.Tensor, per_channel: bool, static: bool) -> Packed:
    """Quantize: ``weight = code * scale``."""
    largest = weight.double().abs().amax(1, keepdim=True) if per_channel else weight.double().abs().max()[None]
    # bfloat16 has these scales exactly.
    scales = torch.where(largest == 0, 1, largest / 127).bfloat16().double()
    codes = (weight.double() / scales).round().clamp(-128, 127)
    tensors = {"weight": codes.to(torch.int8), "weight_scale": scales.bfloat16()}
    if static:
        tensors |= {"input_scale": torch.tensor([0.02]), "input_zero_point": torch.zeros(1, dtype=torch.int8)}
    return tensors, (codes * scales).float()


def compressed_int8(per_channel: bool = True, static: bool = False) -> PackedCheckpoint:
    common = {"num_bits": 8, "type": "int", "symmetric": True}
    weights = common | {"strategy": "channel" if per_channel else "tensor", "dynamic": False}
    inputs = common | {"strategy": "tensor" if static else "token", "dynamic": not static}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": group}}
    return PackedCheckpoint(config, partial(pack, per_channel=per_channel, static=static))


FORMATS = {
    "dynamic": compressed_int8(),
    "static": compressed_int8(static=True),
    "per-tensor": compressed_int8(per_channel=False),
}
