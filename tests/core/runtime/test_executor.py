"""The shipped executors pass the kit, and the kit catches broken ones."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from kit_runner import iter_failures

from minisgl_core.config.options import EngineConfig
from minisgl_core.contracts.executor import Executor, RankPlacement
from minisgl_core.errors import ProviderUnsupportedError
from minisgl_core.plugins.registry import Registry
from minisgl_core.runtime.executor_selection import make_executor
from minisgl_core.runtime.local_executor import LocalExecutor
from minisgl_core.runtime.supervisor import Supervisor
from minisgl_core.testing.executor_kit import ExecutorTests


class TestLocal(ExecutorTests):
    provider = LocalExecutor


class GivesAllOneAddress(LocalExecutor):
    def place(self, directory: str) -> Sequence[RankPlacement]:
        return [replace(each, address=f"ipc://{directory}/all") for each in super().place(directory)]


class HasTwoInitMethods(LocalExecutor):
    def place(self, directory: str) -> Sequence[RankPlacement]:
        placed = super().place(directory)
        return [replace(each, init_method=f"{each.init_method}-{each.rank}") for each in placed]


class CountsFromOne(LocalExecutor):
    def place(self, directory: str) -> Sequence[RankPlacement]:
        return [replace(each, local_rank=each.rank + 1) for each in super().place(directory)]


class StartsAllAsRankZero(LocalExecutor):
    def start(self, name: str, placement: RankPlacement, target: Callable[..., None] | str, *args: Any) -> None:
        first = replace(placement, rank=0)
        super().start(name, first, target, *[first if each is placement else each for each in args])


class StartsNothing(LocalExecutor):
    def start(self, name: str, placement: RankPlacement, target: Callable[..., None] | str, *args: Any) -> None:
        pass


class MiscountsNodes(LocalExecutor):
    def place(self, directory: str) -> Sequence[RankPlacement]:
        return [replace(each, nodes=("here",)) for each in super().place(directory)]


@pytest.mark.parametrize(
    ("broken", "caught_by"),
    [
        (GivesAllOneAddress, "test_placements"),
        (HasTwoInitMethods, "test_placements"),
        (CountsFromOne, "test_placements"),
        (MiscountsNodes, "test_placements"),
        (StartsAllAsRankZero, "test_ranks_start"),
        (StartsNothing, "test_ranks_start"),
    ],
)
def test_a_broken_executor_fails_the_kit(broken: type[Executor], caught_by: str) -> None:
    class Kit(ExecutorTests):
        provider = broken
        limit_s = 4.0

    [(_, error)] = iter_failures(Kit(), caught_by)
    assert isinstance(error, AssertionError), error


def test_the_local_executor_refuses_several_hosts() -> None:
    with pytest.raises(ProviderUnsupportedError, match="use --executor ray"):
        make_executor(EngineConfig.from_flat(tp=2, placement="spread"), Registry.from_environment(), Supervisor())


def test_unsupported_ray_setups_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray may be missing; Ray Client and several engines are unsupported."""
    config, registry = EngineConfig.from_flat(tp=2, executor="ray"), Registry.from_environment()
    if importlib.util.find_spec("ray") is None:
        with pytest.raises(ProviderUnsupportedError, match=r"pip install 'minisgl-backends\[ray\]'"):
            make_executor(config, registry, Supervisor())
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ProviderUnsupportedError, match="leave --replicas out"):
        make_executor(config, registry, Supervisor(), 2)
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(ProviderUnsupportedError, match="RAY_ADDRESS=ray://head:10001 is Ray Client"):
        make_executor(config, registry, Supervisor())
