"""A checkpoint's own account of its quantization: ``quantization_config`` in a ``config.json``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from minisgl_core.errors import ModelFormatError

_COMPRESSED = "compressed-tensors"


class CheckpointQuantization:
    """Method of a checkpoint's quantization, and the modules that it leaves unquantized.

    Attributes:
        config: the mapping as read.
        method: its ``quant_method``, such as ``fp8``.
    """

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> CheckpointQuantization | None:
        """Read it from a model's config; None where the weights are not quantized.

        Raises:
            ModelFormatError: it cannot be read.
        """
        config = raw.get("quantization_config") or raw.get("compression_config")
        return None if not config else cls(config)

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Take a ``quantization_config``.

        Raises:
            ModelFormatError: it names no method, or its lists of modules are no lists of names or regular expressions.
        """
        if not isinstance(config, Mapping) or not isinstance(config.get("quant_method"), str):
            raise ModelFormatError("config: quantization_config has no quant_method")
        self.config, self.method = config, str(config["quant_method"])
        self._groups: list[tuple[_Modules, Mapping[str, Any]]] = []
        if self.method != _COMPRESSED:
            # transformers: a pattern from the start up to a dot, or the end of the name.
            self._ignored = _Modules(config, "modules_to_not_convert")
            return
        self._ignored = _Modules(config, "ignore")
        groups = config.get("config_groups") or {}
        if not isinstance(groups, Mapping) or not all(isinstance(each, Mapping) for each in groups.values()):
            raise ModelFormatError("config: quantization_config.config_groups is no mapping of groups")
        for group in groups.values():
            weights = group.get("weights") or {}
            if not isinstance(weights, Mapping):
                raise ModelFormatError(
                    "config: a group of quantization_config.config_groups has weights that are no mapping"
                )
            self._groups.append((_Modules(group, "targets"), weights))

    @property
    def groups(self) -> list[Mapping[str, Any]]:
        """Descriptions of the weights of each group of modules; only compressed-tensors has several groups."""
        return [weights for _, weights in self._groups] if self.method == _COMPRESSED else [self.config]

    def weights_of(self, name: str) -> Mapping[str, Any] | None:
        """Return how a linear module's weights are stored; None where they are not quantized.

        Args:
            name: of the module in the checkpoint, such as ``model.layers.0.self_attn.q_proj``.
        """
        if self._ignored.have(name):
            return None
        if self.method != _COMPRESSED:
            return self.config
        return next((weights for targets, weights in self._groups if targets.are_all or targets.have(name)), None)

    def leaves(self, names: Iterable[str]) -> bool:
        """Return whether any of some modules is not quantized."""
        return any(self.weights_of(name) is None for name in names)


def block_shape(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale; None where the scales are not of blocks.

    Args:
        weights: how weights are stored, see `CheckpointQuantization.weights_of`.

    Raises:
        ModelFormatError: the sizes are no two whole numbers above 0.
    """
    sizes = weights.get("weight_block_size") or weights.get("block_structure")
    if not sizes:
        return None
    if (
        not isinstance(sizes, list | tuple)
        or len(sizes) != 2
        or not all(type(each) is int and each > 0 for each in sizes)
    ):
        raise ModelFormatError(f"config: quantization_config has blocks of {sizes!r}, not of rows and columns above 0")
    return sizes[0], sizes[1]


class _Modules:
    """A list of modules: names, ends of names, or patterns of their beginnings.

    Attributes:
        are_all: it means every linear layer.
    """

    def __init__(self, config: Mapping[str, Any], key: str) -> None:
        wanted = config.get(key) or []
        if not isinstance(wanted, list | tuple) or not all(isinstance(each, str) for each in wanted):
            raise ModelFormatError(f"config: quantization_config.{key} is no list of names")
        self.are_all = "Linear" in wanted or (key == "targets" and not wanted)
        self._ends = tuple(f".{each}" for each in wanted)
        patterns = [
            f"(?:{each.removeprefix('re:')})" + ("" if each.startswith("re:") else r"(?:\.|$)") for each in wanted
        ]
        try:
            self._pattern = re.compile("|".join(patterns)) if patterns else None
        except re.error as error:
            raise ModelFormatError(f"config: quantization_config.{key} holds no regular expression: {error}") from error

    def have(self, name: str) -> bool:
        """Return whether the list has a module or what it is part of."""
        return self._pattern is not None and bool(self._pattern.match(name) or name.endswith(self._ends))
