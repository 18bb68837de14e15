"""RMSNorm (arXiv 1910.07467)."""

import torch
from torch import nn

from minisgl_core.contracts.layer import FusedProjections, Layer, Targets
from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.shard import Shard, sharded_target
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
            weight_offset: added to the weight after loading; 1 if the checkpoint's norms multiply by ``1 + weight``, as
                Gemma's do. The sum is kept in float32, since its rounding error would be in the outputs of all tokens alike.
        """
        self._rms_norm, self._add_rms_norm = build.ops.norm.rms_norm, build.ops.norm.add_rms_norm
        self.eps = eps
        self._communicator = build.communicator if all_reduce and build.tp_size > 1 else None
        self._weight_offset = weight_offset
        self.weight = empty_parameter(size, build=build)

    def prepare(self) -> None:
        if self._weight_offset:
            self.weight = nn.Parameter(self.weight.float() + self._weight_offset, requires_grad=False)

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


class ShardedRMSNorm(Layer):
    """Norm over a dimension that is split over the ranks, such as all query heads together (OLMo 2).

    Attributes:
        eps: added to the mean square.
    """

    def __init__(self, shard: Shard, eps: float, build: BuildContext) -> None:
        """Allocate this rank's part of the weight.

        Args:
            shard: this rank's part of the dimension. If parts are replicated, each is replicated on the same number of ranks.
            eps: added to the mean square.
            build: ranks, kernels and dtype.
        """
        self._rms_norm, self._shard, self.eps = build.ops.norm.rms_norm, shard, eps
        self._communicator, self._tp_size = build.communicator, build.tp_size
        self.weight = empty_parameter(shard.size, build=build)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the normalised vectors, for its part of x, [..., size]. Every rank calls it."""
        if self._tp_size == 1:
            return self._rms_norm(x, self.weight, self.eps)
        x32 = x.float()
        mean = self._communicator.all_reduce(x32.square().mean(-1, keepdim=True)) / self._tp_size
        return (x32 * torch.rsqrt(mean + self.eps)).to(x.dtype) * self.weight

    def weight_targets(self, name: str, fused_projections: FusedProjections) -> Targets:
        yield f"{name}.weight", sharded_target(self.weight, self._shard)
