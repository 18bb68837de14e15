"""Packers of 4-bit checkpoints, written from the formats' definitions, one word and one code at a time.

Weights are quantized by group to codes 0 to 15: ``weight = (code - zero) * scale``.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from minisgl_core.testing.packed_checkpoint import Packed, PackedCheckpoint

AWQ_POSITIONS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output, within eight, of the code at each position of an AWQ word."""


def pack_words(codes: np.ndarray, axis: int, positions: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Pack along an axis, eight codes per int32; `positions` has the code for each group of four bits, the lowest first."""
    codes = np.moveaxis(codes, axis, 0)
    words = np.zeros((-(-len(codes) // 8), *codes.shape[1:]), dtype=np.uint32)
    for word in range(len(words)):
        for bits, position in enumerate(positions):
            if 8 * word + position < len(codes):
                words[word] |= codes[8 * word + position].astype(np.uint32) << np.uint32(4 * bits)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, 0, axis)).view(np.int32))


def quantize(
    weight: torch.Tensor, group_of: np.ndarray, *, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, torch.Tensor]:
    """Return codes [N, K], scales [N, G], zeros [N, G] and the dequantized weight, float32."""
    values = weight.double().numpy()
    count = int(group_of.max()) + 1
    scales, zeros = np.zeros((len(values), count)), np.full((len(values), count), 8)
    for group in range(count):
        part = values[:, group_of == group]
        if symmetric:
            scales[:, group] = np.abs(part).max(1) / 7.5
        else:
            least, most = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scales[:, group] = (most - least) / 15
            zeros[:, group] = np.round(-least / np.where(scales[:, group] == 0, 1, scales[:, group]))
    scales = np.where(scales == 0, 1, scales)
    # Float32 and bfloat16 have these scales exactly, so that every dtype dequantizes to the same weight.
    scales = torch.from_numpy(scales).bfloat16().double().numpy()
    each = scales[:, group_of]
    codes = np.clip(np.round(values / each) + zeros[:, group_of], 0, 15).astype(np.uint8)
    known = (codes.astype(np.float64) - zeros[:, group_of]) * each
    return codes, scales, zeros, torch.from_numpy(known).float()


def groups(count: int, size: int, *, shuffled: bool = False, seed: int = 0) -> np.ndarray:
    """Return the group of each input, all 0 if `size` is -1. Act-order checkpoints have them in any order."""
    found = np.arange(count) // (count if size == -1 else size)
    return np.random.default_rng((count, seed)).permutation(found) if shuffled else found


def pack_awq(weight: torch.Tensor, size: int = 32, symmetric: bool = False) -> Packed:
    """AutoAWQ's WQLinear_GEMM."""
    codes, scales, zeros, known = quantize(weight, groups(weight.shape[1], size), symmetric=symmetric)
    tensors = {
        "qweight": pack_words(codes.T, 1, AWQ_POSITIONS),
        "scales": torch.from_numpy(scales.T.copy()).float(),
    }
    if not symmetric:
        tensors["qzeros"] = pack_words(zeros.T, 1, AWQ_POSITIONS)
    return tensors, known


def pack_gptq(
    weight: torch.Tensor,
    size: int = 32,
    symmetric: bool = False,
    act_order: bool = False,
    version: int = 1,
    seed: int = 0,
) -> Packed:
    """Pack as AutoGPTQ (version 1, zero points less one) or GPTQModel (version 2)."""
    group_of = groups(weight.shape[1], size, shuffled=act_order, seed=seed)
    codes, scales, zeros, known = quantize(weight, group_of, symmetric=symmetric)
    words = pack_words(zeros.T, 1)
    if version == 1:
        words = (words.to(torch.int64) - 0x11111111).to(torch.int32)
    tensors = {
        "qweight": pack_words(codes.T, 0),
        "qzeros": words,
        "scales": torch.from_numpy(scales.T.copy()).float(),
        "g_idx": torch.from_numpy(group_of).to(torch.int32),
    }
    return tensors, known


def pack_compressed(
    weight: torch.Tensor,
    size: int = 32,
    symmetric: bool = True,
    act_order: bool = False,
    seed: int = 0,
    group_of: np.ndarray | None = None,
) -> Packed:
    """compressed-tensors' pack-quantized: signed codes, stored plus 8. `group_of` has the group of each input, if it is given."""
    if group_of is None:
        group_of = groups(weight.shape[1], size, shuffled=act_order, seed=seed)
    codes, scales, zeros, known = quantize(weight, group_of, symmetric=symmetric)
    tensors = {
        "weight_packed": pack_words(codes, 1),
        "weight_scale": torch.from_numpy(scales).float(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack_words(zeros, 0)
    if act_order:
        tensors["weight_g_idx"] = torch.from_numpy(group_of).to(torch.int32)
    return tensors, known


def awq(size: int = 32, symmetric: bool = False) -> PackedCheckpoint:
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": not symmetric, "version": "gemm"}
    return PackedCheckpoint(config, partial(pack_awq, size=size, symmetric=symmetric))


def gptq(size: int = 32, symmetric: bool = False, act_order: bool = False, version: int = 1) -> PackedCheckpoint:
    config = {"quant_method": "gptq", "bits": 4, "group_size": size, "desc_act": act_order, "sym": symmetric}
    config["checkpoint_format"] = "gptq_v2" if version == 2 else "gptq"
    pack = partial(pack_gptq, size=size, symmetric=symmetric, act_order=act_order, version=version)
    return PackedCheckpoint(config, pack)


def compressed_int4(size: int = 32, symmetric: bool = True, act_order: bool = False) -> PackedCheckpoint:
    weights = {
        "num_bits": 4,
        "type": "int",
        "strategy": "channel" if size == -1 else "group",
        "group_size": None if size == -1 else size,
        "symmetric": symmetric,
        "actorder": "group" if act_order else None,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    pack = partial(pack_compressed, size=size, symmetric=symmetric, act_order=act_order)
    return PackedCheckpoint(config, pack)


FORMATS = {
    "awq": awq(64),
    "awq-symmetric": awq(32, symmetric=True),
    "awq-channel": awq(-1),
    "gptq": gptq(128),
    "gptq-symmetric": gptq(64, symmetric=True),
    "gptq-v2": gptq(32, version=2),
    "gptq-act-order": gptq(32, act_order=True),
    "gptq-channel": gptq(-1, symmetric=True),
    "compressed": compressed_int4(128),
    "compressed-zeros": compressed_int4(32, symmetric=False),
    "compressed-channel": compressed_int4(-1),
    "compressed-act-order": compressed_int4(64, act_order=True),
}
