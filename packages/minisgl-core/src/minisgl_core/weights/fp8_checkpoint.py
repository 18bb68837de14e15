"""Checkpoints with weights in float8: read as they are stored, or dequantized, whatever their scales are of.

A weight ``X.weight`` in float8 has its scales in ``X.weight_scale`` or, as DeepSeek and Qwen write it, ``X.weight_scale_inv``:
one, one per row, or one per block. Scales of activations are not used, since ``--quantization fp8`` finds them for each token.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from minisgl_core.contracts.checkpoint_quantization import CheckpointQuantization, block_shape
from minisgl_core.contracts.weights import LazyTensor
from minisgl_core.errors import ModelFormatError

_SCALES = (".weight_scale", ".weight_scale_inv")
_UNUSED = (".input_scale", ".activation_scale")
METHODS = ("fp8", "compressed-tensors")
"""Values of quant_method that are dequantized."""


class TypedTensor(LazyTensor, Protocol):
    """A tensor that tells whether it is float8 before it is read."""

    @property
    def is_fp8(self) -> bool: ...


def unreadable(config: Mapping[str, Any]) -> list[str]:
    """Say why the weights of a ``config.json`` cannot be dequantized, one sentence per reason.

    Empty if they can, or are not quantized.
    """
    try:
        quantization = CheckpointQuantization.of(config)
    except ModelFormatError as error:
        return [str(error)]
    if quantization is None or quantization.method == "fp8":
        return []
    if quantization.method not in METHODS:
        return [f"its config has quant_method {quantization.method!r}, and {' and '.join(METHODS)} are dequantized"]
    odd = [each for each in quantization.groups if (each.get("type"), each.get("num_bits")) != ("float", 8)]
    if not odd and quantization.groups:
        return []
    shown = ", ".join(f"{each.get('type')} of {each.get('num_bits')} bits" for each in odd) or "no groups"
    return [f"its config has quant_method 'compressed-tensors' with {shown}, of which float of 8 bits is dequantized"]


def joined(
    tensors: Iterator[tuple[str, TypedTensor]], config: Mapping[str, Any], wanted: Container[str] = ()
) -> Iterator[tuple[str, LazyTensor]]:
    """Join weights and their scales, in whatever order they come; everything else passes.

    A weight ``X.weight`` whose ``X.weight_scale`` is wanted stays as it is, and its scales come beside it under that name. They
    have the shape of the blocks then: [1, 1], [rows, 1], or [blocks of rows, blocks of columns]. Other weights are dequantized.

    Args:
        tensors: of the checkpoint.
        config: the ``config.json``; has the size of blocks.
        wanted: names of tensors, see `WeightSource.stored_tensors`.

    Raises:
        ModelFormatError: a weight in float8 has no scales, scales have no such weight, or their shapes do not match.
    """
    quantization = CheckpointQuantization.of(config)
    blocks = [block_shape(weights) for weights in quantization.groups] if quantization else []
    block = next((each for each in blocks if each is not None), None)
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
            scaled = ScaledTensor(name, weights.pop(name), scales.pop(name), block)
            if f"{name}_scale" in wanted:
                yield name, scaled.codes
                yield f"{name}_scale", scaled.scales()
            else:
                yield name, scaled
    for name in (*weights, *scales):
        lacks = (
            "has no scales (weight_scale, weight_scale_inv)" if name in weights else "is not in float8 but has scales"
        )
        raise ModelFormatError(f"{name} {lacks}")


class ScaledTensor:
    """A weight in float8 that is multiplied by its scales as it is read: float32.

    Attributes:
        shape: of the weight.
        codes: the weight as it is stored.
    """

    def __init__(self, name: str, weight: LazyTensor, scales: LazyTensor, block: tuple[int, int] | None) -> None:
        """`block`: rows and columns that share a scale, where the scales are of blocks.

        Raises:
            ModelFormatError: the shape of the scales does not match.
        """
        self.shape = tuple(weight.shape)
        self.codes, self._scales = weight, scales
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
        values = self.codes[index].float()
        scales = self.scales()
        for dim, part in enumerate(index):
            places = torch.arange(self.shape[dim])[part] // self._sizes[dim]
            scales = scales.index_select(dim, places)
        return values.mul_(scales)

    def scales(self) -> torch.Tensor:
        """Return the scales, float32 [blocks of rows, blocks of columns]."""
        return self._scales[()].float().view(_num_blocks(self.shape, self._sizes))


def _num_blocks(shape: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(-(-length // size) for length, size in zip(shape, sizes, strict=True))
