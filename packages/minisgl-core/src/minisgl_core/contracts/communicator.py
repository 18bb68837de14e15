"""Contract of communicators between the ranks of a group."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

AddNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
"""Type of `minisgl_core.contracts.ops.NormOps.add_rms_norm`: (x, residual, weight, eps) to (norm of the sum, the sum)."""


@dataclass(frozen=True, slots=True)
class CommunicatorSpec:
    """Properties of this rank and its group.

    Attributes:
        rank: rank of this process in the group, in ``[0, size)``; not the local rank, which is the index of `device`.
        size: number of ranks of the group.
        device: device of this rank; its index is the local rank.
        init_method: torch.distributed URL, the same for all ranks, such as ``tcp://127.0.0.1:29500``.
        timeout_s: timeout of a collective that a rank does not join.
        is_p2p_only: True for a group between pipeline stages: steps call only its `send` and `recv`, and only startup calls its
            collectives.
        spans_hosts: True if the ranks may run on several hosts.
    """

    rank: int
    size: int
    device: torch.device
    init_method: str
    timeout_s: float = 60.0
    is_p2p_only: bool = False
    spans_hosts: bool = False


class Communicator(ABC):
    """Collectives and point-to-point messages between the ranks of one group.

    A process may have several groups at once, even of the same ranks, because it may have several engines. Each group has its
    own `init_method`, and closing or aborting one group does not affect the others.

    All ranks call the same collectives in the same order, on one thread. Operations are enqueued on the current stream of the
    device. If a rank does not join a collective within ``timeout_s``, a call that waits for the collective raises RuntimeError.
    If the call has already returned, because it only enqueued the collective, then the process ends, or the collective waits
    until `abort`. The group is unusable after that.
    """

    plugin_api: ClassVar[str] = ">=2,<3"

    @classmethod
    def unsupported(cls, spec: CommunicatorSpec) -> list[str]:
        """Return the reasons why this communicator does not support `spec`, one sentence each; empty if it does."""
        return []

    def __init__(self, spec: CommunicatorSpec) -> None:
        """Join the group. This blocks until all `spec.size` ranks have joined."""
        self.rank, self.size = spec.rank, spec.size

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the all-reduced sum of `x` (any shape). It may reduce in place, so callers use only the result."""

    def all_reduce_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, add_norm: AddNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``add_norm(all_reduce(x), residual, weight, eps)``: fused all-reduce, residual add and RMSNorm.

        A communicator may fuse these and shard the residual's rows over the ranks. The returned residual may then be valid only
        in this rank's rows. Pass it only to the next call, with the same shapes and dtypes. So once a model updates a residual
        with this method, it must do so for all later norms that read this residual.

        With pipeline parallelism, the next call may be made by the same tensor-parallel rank of the next stage. So the rows of
        a rank must depend only on rank, size, shapes and dtypes.

        Args:
            x: partial sum of this rank, [T, H]; may be overwritten.
            residual: equal on all ranks, or from the last call, [T, H]; may be overwritten.
            weight: weight of the norm, [H].
            eps: epsilon of the norm.
            add_norm: adds the residual and normalises.

        Returns:
            The normalised sum, equal on all ranks, and the residual.
        """
        return add_norm(self.all_reduce(x), residual, weight, eps)

    @abstractmethod
    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the ranks' `x`, of equal shapes, in rank order along `dim`. `x` does not change."""

    @abstractmethod
    def send(self, x: torch.Tensor, dst: int) -> None:
        """Send `x` (any shape) to rank `dst`, which calls `recv`. `x` does not change.

        It may wait until `dst` receives. Two ranks that exchange tensors call `send` and `recv` in complementary order.
        """

    @abstractmethod
    def recv(self, x: torch.Tensor, src: int) -> torch.Tensor:
        """Receive a tensor from rank `src` into `x`, which is contiguous and has its shape and dtype. Return `x`.

        Tensors from one rank arrive in the order in which they were sent.
        """

    @abstractmethod
    def broadcast_object(self, value: object) -> object:
        """Return rank 0's `value`, a JSON-like object, on all ranks. It may be slow, since it is called only at startup."""

    def abort(self) -> None:
        """Abort the group because another rank has ended. Collectives that wait for it end with undefined results.

        Any thread may call it, even during a collective in another thread, and more than once; `close` must still be called.
        It may block until CUDA graphs with collectives are freed, so call it in a thread while there are any. A waiting
        collective that cannot be aborted ends at its timeout, or when the connection breaks.
        """

    def close(self) -> None:
        """Leave the group, after its work is done and CUDA graphs with collectives are freed. May be called twice."""


class SingleRank(Communicator):
    """Group of one rank, whose collectives are the identity."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return x

    def send(self, x: torch.Tensor, dst: int) -> None:
        raise ValueError(f"a group of one rank has no rank {dst} to send to")

    def recv(self, x: torch.Tensor, src: int) -> torch.Tensor:
        raise ValueError(f"a group of one rank has no rank {src} to receive from")

    def broadcast_object(self, value: object) -> object:
        return value
