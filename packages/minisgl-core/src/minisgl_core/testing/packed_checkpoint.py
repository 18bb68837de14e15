"""Quantized checkpoints of one layer, as the quantization kit loads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from minisgl_core.contracts.checkpoint_quantization import CheckpointQuantization
from minisgl_core.contracts.communicator import SingleRank
from minisgl_core.contracts.layer import Targets
from minisgl_core.contracts.weights import WeightTarget
from minisgl_core.weights.loader import fill_target

Packed = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Tensors of a module by the last part of their names, such as ``weight_scale``; and the weight that they stand for, float32."""


def _plain(weight: torch.Tensor) -> Packed:
    return {"weight": weight}, weight


@dataclass(frozen=True, slots=True)
class PackedCheckpoint:
    """A format of weights; by default that of checkpoints that are not quantized.

    Attributes:
        config: the ``quantization_config``; empty without one.
        pack: quantizes a weight, float32 [out, in].
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    pack: Callable[[torch.Tensor], Packed] = _plain

    def quantization(self, *ignored: str) -> CheckpointQuantization | None:
        """Return it as a provider is given it, with modules that are not quantized."""
        lists = {"ignore": list(ignored), "modules_to_not_convert": list(ignored)} if ignored else {}
        return CheckpointQuantization(dict(self.config) | lists) if self.config else None


@dataclass(frozen=True, slots=True)
class PackedModule:
    """A linear module of a checkpoint.

    Attributes:
        tensors: by the last part of their names, without the bias.
        weight: the weight that they stand for, float32 [out, in].
        bias: [out], or None.
    """

    tensors: Mapping[str, torch.Tensor]
    weight: torch.Tensor
    bias: torch.Tensor | None = None


class Rank(SingleRank):
    """One rank of a group, whose collectives nobody joins."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def fill(targets: Targets, modules: Mapping[str, PackedModule]) -> dict[str, list[WeightTarget]]:
    """Load modules, as the loader and a weight source do: a module that is taken by its weight alone is dequantized for it.

    Args:
        targets: of a layer.
        modules: of the checkpoint, by name.

    Returns:
        The targets by name.

    Raises:
        AssertionError: the targets' names are not those of the modules' tensors.
    """
    held: dict[str, list[WeightTarget]] = {}
    for name, target in targets:
        held.setdefault(name, []).append(target)
    stored: dict[str, torch.Tensor] = {}
    for name, module in modules.items():
        packed = {f"{name}.{kind}": tensor for kind, tensor in module.tensors.items()}
        is_packed = any(each in held for each in packed if each != f"{name}.weight")
        stored |= packed if is_packed else {f"{name}.weight": module.weight}
        if module.bias is not None:
            stored[f"{name}.bias"] = module.bias
    missing, unknown = sorted(set(stored) - set(held)), sorted(set(held) - set(stored))
    assert not missing, f"no target takes {', '.join(missing)}"
    assert not unknown, f"the checkpoint has no {', '.join(unknown)}"
    for name, tensor in stored.items():
        for target in held[name]:
            fill_target(name, tensor, target)
    return held
