"""Root-mean-square norm (arXiv 1910.07467)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from minisgl_core.contracts.communicator import Communicator
from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.weights import WeightTarget
from minisgl_core.layers.base import Layer, empty_parameter


class RMSNorm(Layer):
    """Norm over the last dimension, replicated on every rank.

    Attributes:
        sums: where set, what `add` is given are parts of a sum, one a rank, which this adds up first; from
            `Layer.last_sum` of the layer before.
    """

    def __init__(self, size: int, eps: float, build: BuildContext) -> None:
        """`size` is the last dimension's."""
        super().__init__()
        self._ops, self._eps = build.ops, eps
        self.weight = empty_parameter(size, build=build)
        self.sums: Communicator | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size], any strides."""
        return self._ops.rms_norm(x, self.weight, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm of the sum, the sum); both inputs may be overwritten."""
        add_norm = self._ops.add_rms_norm
        if self.sums is not None:
            return self.sums.all_reduce_add_norm(x, residual, self.weight, self._eps, add_norm)
        return add_norm(x, residual, self.weight, self._eps)

    def weight_targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """``name.weight``."""
        yield f"{name}.weight", WeightTarget(self.weight)
