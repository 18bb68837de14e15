"""Checkpoints of one layer, quantized or not, for the quantization kit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from minisgl_core.contracts.checkpoint_quantization import CheckpointQuantization
from minisgl_core.contracts.communicator import SingleRank
from minisgl_core.contracts.layer import Targets
from minisgl_core.weights.loader import fill_target, targets_by_name

Packed = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Tensors of a module by the last component of their names, such as ``weight_scale``, and the dequantized weight, float32."""


def _plain(weight: torch.Tensor) -> Packed:
    return {"weight": weight}, weight


@dataclass(frozen=True, slots=True)
class PackedCheckpoint:
    """Format of weights in a checkpoint; by default unquantized.

    Attributes:
        config: the ``quantization_config`` of config.json; empty if there is none.
        pack: function that quantizes a weight, float32 [out, in].
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    pack: Callable[[torch.Tensor], Packed] = _plain

    def quantization(self, *ignored: str) -> CheckpointQuantization | None:
        """Return the `CheckpointQuantization` of this format, in which the modules `ignored` are not quantized."""
        lists = {"ignore": list(ignored), "modules_to_not_convert": list(ignored)} if ignored else {}
        return CheckpointQuantization(dict(self.config) | lists) if self.config else None


@dataclass(frozen=True, slots=True)
class PackedModule:
    """Linear module of a checkpoint.

    Attributes:
        tensors: tensors by the last component of their names, without the bias.
        weight: dequantized weight, float32 [out, in].
        bias: [out], or None.
    """

    tensors: Mapping[str, torch.Tensor]
    weight: torch.Tensor
    bias: torch.Tensor | None = None


class AnyRank(SingleRank):
    """Communicator of any rank of a group, for tests that run the ranks in turn. Its collectives return their input."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def fill(targets: Targets, modules: Mapping[str, PackedModule]) -> None:
    """Load the modules of a layer, by name, as the weight loader does.

    A module is dequantized if the layer has no target for its packed tensors.

    Raises:
        AssertionError: the targets' names are not those of the modules' tensors.
    """
    by_name = targets_by_name(targets)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in modules.items():
        packed = {f"{name}.{kind}": tensor for kind, tensor in module.tensors.items()}
        is_packed = any(each in by_name for each in packed if each != f"{name}.weight")
        tensors |= packed if is_packed else {f"{name}.weight": module.weight}
        if module.bias is not None:
            tensors[f"{name}.bias"] = module.bias
    required = {name for name, found in by_name.items() if not found[0].optional}
    unused, missing = sorted(set(tensors) - set(by_name)), sorted(required - set(tensors))
    assert not unused, f"the layer has no target for {', '.join(unused)}"
    assert not missing, f"the checkpoint has no {', '.join(missing)}"
    for name, tensor in tensors.items():
        for target in by_name[name]:
            fill_target(name, tensor, target)
