"""Checkpoints with matrices in float8: each becomes plain numbers when it is read, whatever its scales are of.

A matrix ``X.weight`` in float8 has its scales in ``X.weight_scale`` or, as DeepSeek and Qwen write it, ``X.weight_scale_inv``:
one, one a row, or one a block. Scales of activations are not used, since ``--quantization fp8`` finds them for each token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from minisgl_core.contracts.weights import LazyTensor
from minisgl_core.errors import ModelFormatError

_SCALES = (".weight_scale", ".weight_scale_inv")
_UNUSED = (".input_scale", ".activation_scale")
METHODS = ("fp8", "compressed-tensors")
"""Values of quant_method that are read."""


class TypedTensor(LazyTensor, Protocol):
    """A tensor that tells whether it is float8 before it is read."""

    @property
    def is_fp8(self) -> bool: ...


def unreadable(config: Mapping[str, Any]) -> list[str]:
    """Why a ``config.json``'s quantization cannot be read, one sentence a reason; empty if it can or there is none."""
    quantization = config.get("quantization_config") or config.get("compression_config") or {}
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    if not quantization or method == "fp8":
        return []
    if method != "compressed-tensors":
        return [f"its config has quant_method {method!r}, and {' and '.join(METHODS)} are read"]
    groups = quantization.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values()]
    odd = [each for each in weights if (each.get("type"), each.get("num_bits")) != ("float", 8)]
    if not odd and weights:
        return []
    shown = ", ".join(f"{each.get('type')} of {each.get('num_bits')} bits" for each in odd) or "no groups"
    return [f"its config has quant_method 'compressed-tensors' with {shown}, of which float of 8 bits is read"]


def dequantized(
    tensors: Iterator[tuple[str, TypedTensor]], config: Mapping[str, Any]
) -> Iterator[tuple[str, LazyTensor]]:
    """Join matrices and their scales, in whatever order they come; everything else passes.

    Args:
        tensors: of the checkpoint.
        config: the ``config.json``; has the size of blocks.

    Raises:
        ModelFormatError: a matrix in float8 has no scales, scales have no such matrix, or their shapes do not match.
    """
    quantization = config.get("quantization_config") or config.get("compression_config") or {}
    block = _block(quantization)
    weights: dict[str, LazyTensor] = {}
    scales: dict[str, LazyTensor] = {}
    for name, tensor in tensors:
        ending = next((each for each in _SCALES if name.endswith(each)), None)
        if ending is not None:
            name = name.removesuffix(ending) + ".weight"
            scales[name] = tensor
        elif tensor.is_fp8:
            weights[name] = tensor
        elif not name.endswith(_UNUSED):
            yield name, tensor
            continue
        if name in weights and name in scales:
            yield name, ScaledTensor(name, weights.pop(name), scales.pop(name), block)
    for name in (*weights, *scales):
        lacks = (
            "has no scales (weight_scale, weight_scale_inv)" if name in weights else "is not in float8 but has scales"
        )
        raise ModelFormatError(f"{name} {lacks}")


def _block(quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    sizes = quantization.get("weight_block_size")
    for group in (quantization.get("config_groups") or {}).values():
        sizes = sizes or (group.get("weights") or {}).get("block_structure")
    return None if not sizes else (int(sizes[0]), int(sizes[1]))


class ScaledTensor:
    """A matrix in float8 that is multiplied by its scales as it is read: float32."""

    def __init__(self, name: str, weight: LazyTensor, scales: LazyTensor, block: tuple[int, int] | None) -> None:
        """`block`: rows and columns that share a scale, where the scales are of blocks.

        Raises:
            ModelFormatError: the shape of the scales does not match.
        """
        self.shape = tuple(weight.shape)
        self._weight, self._scales = weight, scales
        shape = tuple(scales.shape)
        if len(self.shape) == 2 and shape in ((), (1,), (1, 1)):
            self._sizes = self.shape
        elif len(self.shape) == 2 and shape in ((self.shape[0],), (self.shape[0], 1)):
            self._sizes = (1, self.shape[1])
        elif len(self.shape) == 2 and block and shape == _num_blocks(self.shape, block):
            self._sizes = block
        else:
            blocks = f"blocks of {block[0]} by {block[1]}" if block else "no size of blocks in the config"
            raise ModelFormatError(
                f"{name} has shape {list(self.shape)} and scales of shape {list(shape)}, with {blocks}"
            )

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        index = (*index, *(slice(None),) * (2 - len(index)))
        values = self._weight[index].float()
        scales = self._scales[()].float().view(_num_blocks(self.shape, self._sizes))
        for dim, part in enumerate(index):
            places = torch.arange(self.shape[dim])[part] // self._sizes[dim]
            scales = scales.index_select(dim, places)
        return values.mul_(scales)


def _num_blocks(shape: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(-(-length // size) for length, size in zip(shape, sizes, strict=True))
