"""Root-mean-square norm (arXiv 1910.07467)."""

from __future__ import annotations

import torch
from torch import nn

from minisgl_core.contracts.layer import Layer, PackedModules, Targets
from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.shard import sharded_target
from minisgl_core.layers.base import Shard, empty_parameter


class RMSNorm(Layer):
    """Norm over the last dimension, replicated on every rank.

    Attributes:
        eps: added to the mean square.
    """

    def __init__(
        self, size: int, eps: float, build: BuildContext, *, all_reduce: bool = False, weight_offset: float = 0.0
    ) -> None:
        """Allocate the weight.

        Args:
            size: of the last dimension.
            eps: added to the mean square.
            build: ranks, kernels and dtype.
            all_reduce: `add` is given this rank's part of a sum, from a layer with ``reduce=False``, and all-reduces it, in
                one kernel where the communicator has one. Then every norm that adds to the same residual must: a fused
                all-reduce may leave the residual spread over the ranks.
            weight_offset: is added to the weight after loading: 1 where the checkpoint's norms multiply by ``1 + weight``, as
                Gemma's do. The sum is in float32, since rounding it would move every token the same way.
        """
        self._rms_norm, self._add_rms_norm = build.ops.norm.rms_norm, build.ops.norm.add_rms_norm
        self.eps = eps
        self._communicator = build.communicator if all_reduce and build.tp_size > 1 else None
        self._weight_offset = weight_offset
        self.weight = empty_parameter(size, build=build)

    def prepare(self) -> None:
        """Add the offset to the weight."""
        if self._weight_offset:
            self.weight = nn.Parameter(self.weight.float() + self._weight_offset, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size], any strides."""
        return self._rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of ``x + residual``, and the sum; both inputs may be overwritten.

        Without a residual the stream begins here: `x` is the same on every rank, and becomes the residual.
        """
        if residual is None:
            return self._rms_norm(x, self.weight, self.eps), x
        if self._communicator is None:
            return self._add_rms_norm(x, residual, self.weight, self.eps)
        return self._communicator.all_reduce_add_norm(x, residual, self.weight, self.eps, self._add_rms_norm)


class ShardedRMSNorm(Layer):
    """Norm over a dimension that is split over the ranks, such as all query heads together (OLMo 2).

    Attributes:
        eps: added to the mean square.
    """

    def __init__(self, shard: Shard, eps: float, build: BuildContext) -> None:
        """Allocate this rank's part of the weight.

        Args:
            shard: this rank's part of the dimension. Parts that several ranks hold are held by equally many.
            eps: added to the mean square.
            build: ranks, kernels and dtype.
        """
        self._rms_norm, self._shard, self.eps = build.ops.norm.rms_norm, shard, eps
        self._communicator, self._tp_size = build.communicator, build.tp_size
        self.weight = empty_parameter(shard.size, build=build)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the normalised vectors, like x [..., size]; with several ranks, a collective."""
        if self._tp_size == 1:
            return self._rms_norm(x, self.weight, self.eps)
        x32 = x.float()
        mean = self._communicator.all_reduce(x32.square().mean(-1, keepdim=True)) / self._tp_size
        return (x32 * torch.rsqrt(mean + self.eps)).to(x.dtype) * self.weight

    def weight_targets(self, name: str, packed: PackedModules) -> Targets:
        """Yield this rank's part."""
        yield f"{name}.weight", sharded_target(self.weight, self._shard)
