"""The executor that is shipped passes the kit, and the kit catches broken ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from minisgl_core.contracts.executor import Executor, RankPlacement
from minisgl_core.runtime.local_executor import LocalExecutor
from minisgl_core.testing.executor_kit import ExecutorTests
from minisgl_core.testing.kit_runner import failures


class TestLocal(ExecutorTests):
    provider = LocalExecutor


class GivesAllOneAddress(LocalExecutor):
    def place(self, directory: str) -> Sequence[RankPlacement]:
        return [replace(each, address=f"ipc://{directory}/all") for each in super().place(directory)]


class HasTwoMeetingPlaces(LocalExecutor):
    def place(self, directory: str) -> Sequence[RankPlacement]:
        placed = super().place(directory)
        return [replace(each, init_method=f"{each.init_method}-{each.rank}") for each in placed]


class CountsFromOne(LocalExecutor):
    def place(self, size: int, directory: str) -> Sequence[RankPlacement]:
        return [replace(each, local_rank=each.rank + 1) for each in super().place(size, directory)]


class StartsThemAllAsRankZero(LocalExecutor):
    def start(self, name: str, placement: RankPlacement, target: Callable[..., None] | str, *args: Any) -> None:
        first = replace(placement, rank=0)
        super().start(name, first, target, *[first if each is placement else each for each in args])


class StartsNothing(LocalExecutor):
    def start(self, name: str, placement: RankPlacement, target: Callable[..., None] | str, *args: Any) -> None:
        pass


@pytest.mark.parametrize(
    "broken", [GivesAllOneAddress, HasTwoMeetingPlaces, CountsFromOne, StartsThemAllAsRankZero, StartsNothing]
)
def test_a_broken_executor_fails_the_kit(broken: type[Executor]) -> None:
    class Kit(ExecutorTests):
        provider = broken
        limit_s = 8.0

    assert failures(Kit())
