"""Experts of a checkpoint that stores them packed, with a scale per block of inputs."""

from __future__ import annotations

from dataclasses import replace

import torch

from minisgl_backends.moe.packed_weights import clear_rows_of_others, in_whole_blocks
from minisgl_core.contracts.layer_methods import ExpertsMethod, ExpertsSpec
from minisgl_core.contracts.moe import MoeKernel


class PackedExperts(ExpertsMethod):
    """Base of experts that a rank loads in whole blocks of its part of the intermediate size."""

    def __init__(self, spec: ExpertsSpec, kernel: type[MoeKernel]) -> None:
        self._inner, loaded = spec.inner, in_whole_blocks(spec.inner)
        super().__init__(replace(spec, inner=loaded, moe=replace(spec.moe, intermediate_size=loaded.size)), kernel)

    def clear_rows_of_others(self, *gate_up: torch.Tensor | None) -> None:
        """Clear the gate rows and up rows of neighbouring ranks in tensors [E, 2 * I, ...]."""
        for each in gate_up:
            if each is not None:
                clear_rows_of_others(each, self._inner, self.spec.inner)
