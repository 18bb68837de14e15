"""Float8 weights of checkpoints, read as they are stored or dequantized.

The scales of a float8 weight ``X.weight`` are in ``X.weight_scale`` or, in DeepSeek's and Qwen's checkpoints,
``X.weight_scale_inv``. There is one scale per tensor, per row or per block. Static scales of activations are skipped, since
``--quantization fp8`` quantizes activations per token.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from minisgl_core.contracts.checkpoint_quantization import CheckpointQuantization, block_shape, int4_format, is_int8
from minisgl_core.contracts.weights import LazyTensor
from minisgl_core.errors import ModelFormatError

if TYPE_CHECKING:
    import torch

_SCALES = (".weight_scale", ".weight_scale_inv")
_UNUSED = (".input_scale", ".activation_scale")
METHODS = ("fp8", "compressed-tensors")
"""Values of quant_method that are dequantized."""


class TypedTensor(LazyTensor, Protocol):
    """Lazy tensor whose dtype is known before it is read."""

    @property
    def is_fp8(self) -> bool:
        """True if the stored dtype is one of the float8 types."""


def reasons_against_dequantization(config: Mapping[str, Any]) -> list[str]:
    """Return the reasons why the weights cannot be dequantized, one sentence each. Empty if they can be, or are not quantized."""
    try:
        quantization = CheckpointQuantization.of(config)
        if quantization is None or quantization.is_float8:
            return []
        are_int4 = [int4_format(quantization, each) is not None for each in quantization.groups]
        are_int8 = [is_int8(quantization, each) for each in quantization.groups]
    except ModelFormatError as error:
        return [str(error)]
    method = quantization.method
    if are_int4 and all(are_int4):
        return [f"its weights are 4-bit integers (quant_method {method!r}), which --quantization int4 reads"]
    if method == "mxfp4":
        return ["its experts are in MXFP4, which --quantization mxfp4 reads"]
    if are_int8 and all(are_int8):
        return ["its weights are 8-bit integers (compressed-tensors), which --quantization int8 reads"]
    if method not in METHODS:
        return [f"its config has quant_method {method!r}, but only {' and '.join(METHODS)} are supported"]
    odd = [each for each in quantization.groups if (each.get("type"), each.get("num_bits")) != ("float", 8)]
    shown = [f"type {each.get('type')!r}, num_bits {each.get('num_bits')}" for each in odd] or ["no config_groups"]
    why = "only type 'float' with num_bits 8 is supported"
    return [f"its quant_method 'compressed-tensors' has {', '.join(shown)}; {why}"]


def join_scales(
    tensors: Iterator[tuple[str, TypedTensor]], config: Mapping[str, Any], wanted: Container[str]
) -> Iterator[tuple[str, LazyTensor]]:
    """Pair float8 weights with their scales, which may come in any order, and yield all other tensors unchanged.

    If ``X.weight_scale`` is in `wanted`, ``X.weight`` and ``X.weight_scale`` are yielded as they are stored. The scales then have
    shape [1, 1], [rows, 1] or [row blocks, column blocks]. Other float8 weights are dequantized when they are read.

    `config` is the checkpoint's ``config.json``, which has the block size.

    Raises:
        ModelFormatError: a float8 weight has no scales, scales belong to no float8 weight, or shapes do not match.
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
                yield name, scaled.weight
                yield f"{name}_scale", scaled.scales()
            else:
                yield name, scaled
    if weights:
        raise ModelFormatError(f"{next(iter(weights))} is float8 and has neither weight_scale nor weight_scale_inv")
    if scales:
        raise ModelFormatError(f"{next(iter(scales))} has scales but is not float8")


class ScaledTensor:
    """Float8 weight that is dequantized to float32 when it is read; `weight` is as it is stored."""

    def __init__(self, name: str, weight: LazyTensor, scales: LazyTensor, block: tuple[int, int] | None) -> None:
        """`block`: numbers of rows and columns that share a scale, if the checkpoint has block scales."""
        self.shape = tuple(weight.shape)
        self.weight, self._scales, self._name = weight, scales, name
        shape = tuple(scales.shape)
        if len(self.shape) == 2 and shape in ((), (1,), (1, 1)):
            self._block = self.shape
        elif len(self.shape) == 2 and shape in ((self.shape[0],), (self.shape[0], 1)):
            self._block = (1, self.shape[1])
        elif len(self.shape) == 2 and block and shape == _num_blocks(self.shape, block):
            self._block = block
        else:
            blocks = f"blocks of {block[0]} by {block[1]}" if block else "no block size in the config"
            raise ModelFormatError(f"{name}, {list(self.shape)}, has scales of shape {list(shape)}, with {blocks}")

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        import torch

        index = (*index, *(slice(None),) * (2 - len(index)))
        values = self.weight[index].float()
        scales = self.scales()
        for dim, part in enumerate(index):
            block_ids = torch.arange(self.shape[dim])[part] // self._block[dim]
            scales = scales.index_select(dim, block_ids)
        return values.mul_(scales)

    def scales(self) -> torch.Tensor:
        """Return the scales, float32 [row blocks, column blocks]."""
        scales = self._scales[()]
        if not scales.dtype.is_floating_point:  # such as the exponents that other formats store as uint8
            raise ModelFormatError(f"{self._name} has scales in {scales.dtype}, not in a floating-point dtype")
        return scales.float().view(_num_blocks(self.shape, self._block))


def _num_blocks(shape: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(-(-length // size) for length, size in zip(shape, sizes, strict=True))
