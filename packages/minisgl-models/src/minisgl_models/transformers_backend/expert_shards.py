"""Shards of the experts of a transformers model, whose weights are stacked: [experts, out, in], or [experts, in, out].

Every rank has a part of each expert, along its intermediate dimension, and an all-reduce sums the outputs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.weights import WeightTarget
from minisgl_core.errors import InvalidValueError
from minisgl_models.transformers_backend.parallel import EXPERTS, LinearModule, generic_name

_STYLES = {"colwise": (1, 1), "rowwise": (2, 1), "packed_colwise": (1, 2), "packed_rowwise": (2, 2)}
"""Sharded dimension and number of fused projections (gate and up: 2), by style."""


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """This rank's shard of a parameter.

    Attributes:
        dim: sharded dimension.
        num_parts: projections that are fused along `dim`. Each of them is sharded.
        rank: rank in the tensor-parallel group.
        size: number of ranks.
    """

    dim: int
    num_parts: int
    rank: int
    size: int

    def of_matrix(self, num_sources: int, name: str) -> "ParameterShard":
        """Return the shard of one matrix of an expert, of which the checkpoint stores `num_sources` to be concatenated by rows.

        Raises:
            InvalidValueError: the plan shards the concatenation as one projection. `name` is that of the parameter.
        """
        num_parts = self.num_parts // num_sources if self.dim == 1 else self.num_parts
        if not num_parts:
            raise InvalidValueError(
                "--tp",
                self.size,
                f"1: the tensor-parallel plan of the model shards {name} as one matrix, and checkpoints store {num_sources} per"
                " expert",
            )
        return ParameterShard(self.dim - 1, num_parts, self.rank, self.size)

    def targets(self, tensor: torch.Tensor) -> Iterator[WeightTarget]:
        """Yield the targets of a checkpoint tensor, one per fused projection; `tensor` has this rank's shape."""
        shape = list(tensor.shape)
        shape[self.dim] *= self.size
        for index, part in enumerate(tensor.chunk(self.num_parts, self.dim)):
            length = part.shape[self.dim]
            start = (index * self.size + self.rank) * length
            yield WeightTarget(part, (*[slice(None)] * self.dim, slice(start, start + length)), shape=tuple(shape))


def shard_experts(model: nn.Module, plan: Mapping[str, str], build: BuildContext) -> dict[str, ParameterShard]:
    """Reduce the parameters of experts to this rank's shard, and all-reduce the outputs of the experts.

    The model is on the meta device, and the plan is that of `minisgl_models.transformers_backend.parallel.tp_plan`.

    Returns:
        The shards by the name of their parameter.

    Raises:
        InvalidValueError: ``--tp`` does not divide the experts, the plan lacks one of their parameters, or their weights are
            not stacked.
    """

    def all_reduce(_module: nn.Module, _arguments: Any, output: torch.Tensor) -> torch.Tensor:
        return build.communicator.all_reduce(output)

    shards = {}
    for path, experts in model.named_modules():
        if plan.get(generic_name(path)) != EXPERTS:
            continue
        for attribute, parameter in _stacked_parameters(path, experts, build).items():
            name = f"{path}.{attribute}"
            shard = shards[name] = _shard(name, parameter, plan, build)
            shape = list(parameter.shape)
            shape[shard.dim] //= shard.size
            setattr(experts, attribute, nn.Parameter(parameter.new_empty(shape), requires_grad=False))
        experts.register_forward_hook(all_reduce)
    return shards


def _stacked_parameters(path: str, experts: nn.Module, build: BuildContext) -> dict[str, nn.Parameter]:
    """Return the parameters of experts by their name, without `path`; refuse experts that are modules of their own."""
    parameters = dict(experts.named_parameters(recurse=False))
    has_linears = any(isinstance(each, LinearModule) for each in experts.modules())
    if not parameters or has_linears or len(parameters) < len(list(experts.parameters())):
        raise InvalidValueError(
            "--tp",
            build.tp_size,
            f"1: the tensor-parallel plan of the model has {EXPERTS!r} for {path}, whose weights are not stacked parameters",
        )
    return parameters


def _shard(name: str, parameter: torch.Tensor, plan: Mapping[str, str], build: BuildContext) -> ParameterShard:
    style = plan.get(generic_name(name), "replicate")
    if style not in _STYLES or parameter.ndim != 3:
        raise InvalidValueError(
            "--tp",
            build.tp_size,
            f"1: {name} of the experts has {parameter.ndim} dimensions and the style {style!r}, which minisgl does not know",
        )
    dim, num_parts = _STYLES[style]
    length = parameter.shape[dim] // num_parts
    if length % build.tp_size:
        raise InvalidValueError("--tp", build.tp_size, f"a divisor of {length}, the intermediate size of {name}")
    return ParameterShard(dim, num_parts, build.tp_rank, build.tp_size)
