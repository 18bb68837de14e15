"""Reader of the ``quantization_config`` in a checkpoint's ``config.json``.

The weights source of GGUF files writes one: ``quant_method`` is gguf, and ``types`` maps the names of modules to GGML's types.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from minisgl_core.errors import ModelFormatError

_COMPRESSED = "compressed-tensors"
_GGUF = "gguf"


class CheckpointQuantization:
    """Method of a checkpoint's quantization, and the modules that it leaves unquantized.

    Attributes:
        config: content of the ``quantization_config``.
        method: value of ``quant_method``, such as ``fp8``.
    """

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> CheckpointQuantization | None:
        """Return the quantization of a model's config; None if the weights are not quantized.

        Raises:
            ModelFormatError: the ``quantization_config`` is malformed.
        """
        config = raw.get("quantization_config") or raw.get("compression_config")
        return None if not config else cls(config)

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Parse a ``quantization_config``.

        Raises:
            ModelFormatError: ``quant_method`` is missing, or a list of modules has entries other than names and patterns.
        """
        if not isinstance(config, Mapping) or not isinstance(config.get("quant_method"), str):
            raise ModelFormatError("config: quantization_config has no quant_method")
        self.config, self.method = config, str(config["quant_method"])
        self._groups: list[tuple[_Modules, Mapping[str, Any]]] = []
        if self.method == _GGUF and not isinstance(config.get("types"), Mapping):
            raise ModelFormatError(
                "config: quantization_config.types must map the modules of a GGUF file to GGML's types"
            )
        if self.method != _COMPRESSED:
            # As in transformers, an entry matches the beginning of a name up to a dot, or the end of a name.
            self._ignored = _Modules(config, "modules_to_not_convert")
            return
        self._ignored = _Modules(config, "ignore")
        groups = config.get("config_groups") or {}
        if not isinstance(groups, Mapping) or not all(isinstance(each, Mapping) for each in groups.values()):
            raise ModelFormatError("config: quantization_config.config_groups must map names to groups")
        for group in groups.values():
            weights = group.get("weights") or {}
            if not isinstance(weights, Mapping):
                raise ModelFormatError(
                    "config: in quantization_config.config_groups, the weights of a group must be a mapping"
                )
            self._groups.append((_Modules(group, "targets"), weights))

    @property
    def groups(self) -> list[Mapping[str, Any]]:
        """Weight formats of all groups of modules; only compressed-tensors has several groups."""
        return [weights for _, weights in self._groups] if self.method == _COMPRESSED else [self.config]

    def weights_of(self, name: str) -> Mapping[str, Any] | None:
        """Return the weight format of a linear module; None if the module is not quantized.

        Args:
            name: name of the module in the checkpoint, such as ``model.layers.0.self_attn.q_proj``.
        """
        if self._ignored.have(name):
            return None
        if self.method == _GGUF:
            kind = self.config["types"].get(name)
            return None if kind is None else {"type": kind}
        if self.method != _COMPRESSED:
            return self.config
        return next((weights for targets, weights in self._groups if targets.are_all or targets.have(name)), None)

    def leaves(self, names: Iterable[str]) -> bool:
        """Return True if the checkpoint leaves any of these modules unquantized."""
        return any(self.weights_of(name) is None for name in names)


def block_shape(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the numbers of rows and columns that share a scale; None if there are no block scales.

    Args:
        weights: weight format; see `CheckpointQuantization.weights_of`.

    Raises:
        ModelFormatError: the block size is not two integers above 0.
    """
    sizes = weights.get("weight_block_size") or weights.get("block_structure")
    if not sizes:
        return None
    if (
        not isinstance(sizes, list | tuple)
        or len(sizes) != 2
        or not all(type(each) is int and each > 0 for each in sizes)
    ):
        raise ModelFormatError(
            f"config: quantization_config has the block size {sizes!r}, which must be two integers above 0"
        )
    return sizes[0], sizes[1]


class _Modules:
    """List of modules, given by names, endings of names, or regular expressions that match their beginnings.

    Attributes:
        are_all: True if the list means every linear layer.
    """

    def __init__(self, config: Mapping[str, Any], key: str) -> None:
        wanted = config.get(key) or []
        if not isinstance(wanted, list | tuple) or not all(isinstance(each, str) for each in wanted):
            raise ModelFormatError(f"config: quantization_config.{key} must be a list of names")
        self.are_all = "Linear" in wanted or (key == "targets" and not wanted)
        self._ends = tuple(f".{each}" for each in wanted)
        patterns = [
            f"(?:{each.removeprefix('re:')})" + ("" if each.startswith("re:") else r"(?:\.|$)") for each in wanted
        ]
        try:
            self._pattern = re.compile("|".join(patterns)) if patterns else None
        except re.error as error:
            raise ModelFormatError(
                f"config: quantization_config.{key} has an invalid regular expression: {error}"
            ) from error

    def have(self, name: str) -> bool:
        """Return True if the list contains a module or a module that contains it."""
        return self._pattern is not None and bool(self._pattern.match(name) or name.endswith(self._ends))
