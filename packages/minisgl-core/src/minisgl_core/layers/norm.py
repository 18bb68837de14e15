"""RMSNorm (arXiv 1910.07467)."""

from __future__ import annotations

import torch

from minisgl_core.contracts.layer import Layer
from minisgl_core.contracts.model import BuildContext
from minisgl_core.layers.base import empty_parameter


class RMSNorm(Layer):
    """RMSNorm over the last dimension, with a weight that is replicated on every rank.

    Attributes:
        eps: added to the mean square.
    """

    def __init__(
        self, size: int, eps: float, build: BuildContext, *, all_reduce: bool = False, weight_offset: float = 0.0
    ) -> None:
        """Allocate the weight.

        Args:
            size: size of the last dimension.
            eps: added to the mean square.
            build: ranks, kernels and dtype.
            all_reduce: True if `add` all-reduces its input, the output of a layer with ``reduce=False``. Some communicators fuse
                the all-reduce with the norm and leave the residual sharded over the ranks. So either all or none of the norms
                that add to one residual must set it.
            weight_offset: added to the weight after loading, in the model's dtype; 1 if the checkpoint's norms multiply by
                ``1 + weight``, as Gemma's do.
        """
        self._rms_norm, self._add_rms_norm = build.ops.norm.rms_norm, build.ops.norm.add_rms_norm
        self.eps = eps
        self._communicator = build.communicator if all_reduce and build.tp_size > 1 else None
        self._weight_offset = weight_offset
        self.weight = empty_parameter(size, build=build)

    def prepare(self) -> None:
        """Add the offset to the weight."""
        if self._weight_offset:
            self.weight.add_(self._weight_offset)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of x, [..., size], which may have any strides."""
        return self._rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of ``x + residual``, and the sum, which is the new residual. Both inputs may be overwritten.

        If `residual` is None, `x` is the new residual. It must be equal on all ranks then, since it is not all-reduced.
        """
        if residual is None:
            return self._rms_norm(x, self.weight, self.eps), x
        if self._communicator is None:
            return self._add_rms_norm(x, residual, self.weight, self.eps)
        return self._communicator.all_reduce_add_norm(x, residual, self.weight, self.eps, self._add_rms_norm)
