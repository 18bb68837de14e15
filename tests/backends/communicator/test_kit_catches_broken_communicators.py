"""Each class breaks one promise of the contract, which the kit's checks must notice.

Ranks are threads here, which Gloo allows and which is faster. Only the last tests start processes.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from kit_runner import failures

from minisgl_backends.communicator.torch_distributed import TorchCommunicator
from minisgl_core.contracts.communicator import Communicator, CommunicatorSpec
from minisgl_core.testing.communicator_checks import Rank, run_checks
from minisgl_core.testing.communicator_kit import CommunicatorTests


class MistakesItsRank(TorchCommunicator):
    def __init__(self, spec: CommunicatorSpec) -> None:
        super().__init__(spec)
        self.rank = 0


class SumsFloat32Only(TorchCommunicator):
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return super().all_reduce(x) if x.dtype == torch.float32 else x


class WidensSums(TorchCommunicator):
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return super().all_reduce(x.float())


class IgnoresStrides(TorchCommunicator):
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return super().all_reduce(x) if x.is_contiguous() else super().all_reduce(x.t()).reshape(x.shape)


class GathersBackwards(TorchCommunicator):
    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(super().all_gather(x, dim).chunk(self.size, dim)[::-1], dim)


class GathersAlongTheFirstDim(TorchCommunicator):
    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return super().all_gather(x, 0)


class GathersInPlace(TorchCommunicator):
    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        result = super().all_gather(x, dim)
        x.zero_()
        return result


class RoundsByRank(TorchCommunicator):
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return super().all_reduce(x) * (1 + 2**-20 * self.rank)


class SendsAnotherTensor(TorchCommunicator):
    def send(self, x: torch.Tensor, dst: int) -> None:
        super().send(x + 1, dst)


class ReceivesIntoAnother(TorchCommunicator):
    def recv(self, x: torch.Tensor, src: int) -> torch.Tensor:
        return super().recv(x.clone(), src)


class SendsWithoutStrides(TorchCommunicator):
    def send(self, x: torch.Tensor, dst: int) -> None:
        super().send(x if x.is_contiguous() else x.t().reshape(x.shape), dst)


class KeepsItsOwnObject(TorchCommunicator):
    def broadcast_object(self, value: object) -> object:
        super().broadcast_object(value)
        return value


class RemembersTheFirstObject(TorchCommunicator):
    first: list[object]

    def broadcast_object(self, value: object) -> object:
        if not hasattr(self, "first"):
            self.first = [super().broadcast_object(value)]
        return self.first[0]


class ClosesOnce(TorchCommunicator):
    def close(self) -> None:
        self._open_group()
        super().close()


class AbortsOnce(TorchCommunicator):
    def abort(self) -> None:
        assert not hasattr(self, "is_aborted")
        self.is_aborted = True


class AbortsBetweenCollectives(TorchCommunicator):
    is_waiting = False

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.is_waiting = True
        try:
            return super().all_reduce(x)
        finally:
            self.is_waiting = False

    def abort(self) -> None:
        assert not self.is_waiting


class AbortsTogether(TorchCommunicator):
    """Waits in `abort` for the other ranks, which may not abort."""

    def abort(self) -> None:
        self.all_reduce(torch.zeros(1))


class FailsToCloseAfterAbort(TorchCommunicator):
    is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True

    def close(self) -> None:
        assert not self.is_aborted
        super().close()


class SwallowsTimeouts(TorchCommunicator):
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return super().all_reduce(x)
        except RuntimeError:
            return x


class IgnoresLostRanks(TorchCommunicator):
    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        try:
            return super().all_gather(x, dim)
        except RuntimeError:
            return torch.cat([x] * self.size, dim)


BROKEN = [
    kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Communicator) and kind.__module__ == __name__
]


def errors(provider: type[Communicator], folder: Path, default_timeout_s: float) -> list[BaseException]:
    """Run the checks of two ranks, and return the errors of those that failed."""
    ranks = [Rank(provider, torch.device("cpu"), rank, 2, folder, default_timeout_s) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run_checks, rank, with_faults=True) for rank in ranks]
    return [error for run in runs if (error := run.exception())]


@pytest.mark.nightly
@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_communicator_fails_a_check(broken: type[Communicator], tmp_path) -> None:
    assert errors(broken, tmp_path, default_timeout_s=3)


@pytest.mark.nightly
def test_a_correct_communicator_passes(tmp_path) -> None:
    assert errors(TorchCommunicator, tmp_path, default_timeout_s=60) == []


def test_the_kit_reports_failures_of_ranks() -> None:
    class Kit(CommunicatorTests):
        provider = GathersBackwards
        sizes = (2,)
        raises_on_timeout = False

    (error,) = failures(Kit()).values()
    assert "check_all_gather" in str(error)


class DiesInACollective(TorchCommunicator):
    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        os._exit(3)


def test_the_kit_names_the_check_that_ends_a_rank() -> None:
    class Kit(CommunicatorTests):
        provider = DiesInACollective
        sizes = (2,)
        raises_on_timeout = False

    (error,) = failures(Kit()).values()
    assert re.search("rank [01] of 2 failed in check_all_gather: .*exit code 3", str(error), re.DOTALL)
