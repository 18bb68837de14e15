"""The extension point for communication between the ranks of a group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

AddNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
"""`minisgl_core.contracts.ops.NormOps.add_rms_norm`: (x, residual, weight, eps) to (norm of the sum, the sum)."""


@dataclass(frozen=True, slots=True)
class CommunicatorSpec:
    """Describes this rank's place in a group.

    Attributes:
        rank: this process's rank in the group, in ``[0, size)``, whatever host it is on.
        size: ranks of the group.
        device: this rank's device; its index is the rank's number on its own host.
        init_method: a torch.distributed URL that all ranks share, such as ``tcp://127.0.0.1:29500``.
        timeout_s: seconds after which a collective that a rank never joins is an error.
    """

    rank: int
    size: int
    device: torch.device
    init_method: str
    timeout_s: float = 60.0


class Communicator(ABC):
    """Collectives and point-to-point messages between the ranks of one group.

    A process may hold several groups at once, of the same ranks even, as it may hold several engines: each group is given an
    `init_method` of its own, and closing or aborting one leaves the others alone.

    Every rank calls the same collectives in the same order, on one thread. Operations are enqueued on the current
    stream of the device. One that some rank does not join within ``timeout_s``, because it ended or does something
    else, raises RuntimeError; where it was only enqueued, it ends the process or waits until `abort`. A group is of no
    use after that.
    """

    plugin_api: ClassVar[str] = ">=2,<3"

    @classmethod
    def unsupported(cls, spec: CommunicatorSpec) -> list[str]:
        """Say why this communicator cannot serve `spec`, one sentence a reason; empty if it can."""
        return []

    def __init__(self, spec: CommunicatorSpec) -> None:
        """Join the group; blocks until all `spec.size` ranks have joined."""
        self.rank, self.size = spec.rank, spec.size

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` (any shape) over the ranks. May reduce in place; callers use the return value only."""

    def all_reduce_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, add_norm: AddNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``add_norm(all_reduce(x), residual, weight, eps)``, which most sums of a model are followed by.

        A communicator may do it in one step, and share the rows out over the ranks: the residual that comes back may then
        be up to date in this rank's rows alone. It is for the next call with the same shapes and dtypes, and for nothing
        else: who adds to a residual by this does so up to the last norm that needs it.

        Args:
            x: this rank's part of a sum, [T, H]; may be overwritten.
            residual: the same on every rank or from the last call, [T, H]; may be overwritten.
            weight: of the norm, [H].
            eps: added to the mean square.
            add_norm: adds and normalises what is summed.

        Returns:
            The norm, the same on every rank, and the residual.
        """
        return add_norm(self.all_reduce(x), residual, weight, eps)

    @abstractmethod
    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the ranks' `x` (same shape on each) in rank order along `dim`. Leaves `x` as it is."""

    @abstractmethod
    def send(self, x: torch.Tensor, dst: int) -> None:
        """Send `x` (any shape) to rank `dst`, which calls `recv`. Leaves `x` as it is.

        It may wait until `dst` receives; two ranks that exchange tensors call these in complementary order.
        """

    @abstractmethod
    def recv(self, x: torch.Tensor, src: int) -> torch.Tensor:
        """Receive what rank `src` sends into `x`, which is contiguous and has its shape and dtype. Returns `x`.

        Messages from one rank arrive in the order in which they were sent.
        """

    @abstractmethod
    def broadcast_object(self, value: object) -> object:
        """Give every rank rank 0's `value`, a JSON-like object; the others' is not used. Slow; for start-up checks."""

    def abort(self) -> None:
        """Give the group up because another rank is gone: what waits for that rank on the device ends, with any result.

        Any thread may call it, beside a collective in another one, and more than once; `close` is still to be called.
        It may return only when the device graphs that hold collectives have been freed. Where a collective that waits
        cannot be ended, it ends by itself: at its timeout, or because the connection broke.
        """

    def close(self) -> None:
        """Leave the group, when its work is done and device graphs that hold collectives are freed. Safe to call twice."""


class SingleRank(Communicator):
    """The group of one rank: every collective is the identity."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """`x` itself."""
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """`x` itself."""
        return x

    def send(self, x: torch.Tensor, dst: int) -> None:
        """There is no other rank."""
        raise ValueError(f"a group of one rank has no rank {dst} to send to")

    def recv(self, x: torch.Tensor, src: int) -> torch.Tensor:
        """There is no other rank."""
        raise ValueError(f"a group of one rank has no rank {src} to receive from")

    def broadcast_object(self, value: object) -> object:
        """`value` itself."""
        return value
