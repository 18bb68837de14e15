"""Base class of the experts of 4-bit checkpoints, which have a scale per block of inputs."""

from dataclasses import replace

import torch

from minisgl_backends.moe.packed_weights import BLOCK
from minisgl_core.contracts.layer_methods import ExpertsMethod, ExpertsSpec
from minisgl_core.contracts.moe import MoeKernel
from minisgl_core.contracts.shard import Shard


class PackedExperts(ExpertsMethod):
    """Experts whose weights are loaded as the checkpoint has them, packed.

    A rank loads its shard of the intermediate size, extended to whole blocks, which `spec` describes. The inputs of a block share
    a scale in the down projection. A neighboring rank computes the rows that only complete a block, so
    `zero_neighbor_rows` makes them zero in the gate and up projections here.
    """

    def __init__(self, spec: ExpertsSpec, kernel: type[MoeKernel]) -> None:
        self._inner, loaded = spec.inner, _extended_to_blocks(spec.inner)
        super().__init__(replace(spec, inner=loaded, moe=replace(spec.moe, intermediate_size=loaded.size)), kernel)

    def zero_neighbor_rows(self, *gate_up: torch.Tensor | None) -> None:
        """Zero the gate and up rows that belong to neighboring ranks, in tensors [E, 2 * I, ...]."""
        first = self._inner.start - self.spec.inner.start
        for each in gate_up:
            if each is not None:
                rows = each.view(len(each), 2, self.spec.inner.size, -1)
                rows[:, :, :first] = 0
                rows[:, :, first + self._inner.unpadded_size :] = 0


def _extended_to_blocks(inner: Shard) -> Shard:
    """Return the shard extended to whole blocks of 32; an empty shard becomes one block."""
    start, stop = min(inner.start, inner.total - 1) // BLOCK * BLOCK, min(-(-inner.stop // BLOCK) * BLOCK, inner.total)
    return Shard(start, stop, stop - start, inner.total)
