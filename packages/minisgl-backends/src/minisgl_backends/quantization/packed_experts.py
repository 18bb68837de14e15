"""Base class of the experts of 4-bit checkpoints, which have a scale per block of inputs."""

from dataclasses import replace

import torch

from minisgl_backends.moe.packed_weights import extend_to_blocks, zero_neighbor_rows
from minisgl_core.contracts.layer_methods import ExpertsMethod, ExpertsSpec
from minisgl_core.contracts.moe import MoeKernel


class PackedExperts(ExpertsMethod):
    """Experts whose weights are loaded as the checkpoint has them, packed.

    A rank loads its shard of the intermediate size, extended to whole blocks, which `spec` describes. The inputs of a block share
    a scale in the down projection. A neighboring rank computes the rows that only complete a block, so
    `zero_neighbor_rows` makes them zero in the gate and up projections here.
    """

    def __init__(self, spec: ExpertsSpec, kernel: type[MoeKernel]) -> None:
        self._inner, loaded = spec.inner, extend_to_blocks(spec.inner)
        super().__init__(replace(spec, inner=loaded, moe=replace(spec.moe, intermediate_size=loaded.size)), kernel)

    def zero_neighbor_rows(self, *gate_up: torch.Tensor | None) -> None:
        """Zero the gate and up rows that belong to neighboring ranks, in tensors [E, 2 * I, ...]."""
        for each in gate_up:
            if each is not None:
                zero_neighbor_rows(each, self._inner, self.spec.inner)
