"""Ranks that hang or fail during startup."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from minisgl_core.config.options import EngineConfig
from minisgl_core.errors import WorkerDiedError
from minisgl_core.plugins.registry import Registry
from minisgl_core.runtime.ipc import IpcAddresses
from minisgl_core.runtime.supervisor import Supervisor
from minisgl_server.launch import replicas as replicas_module
from minisgl_server.launch.replicas import Replicas
from minisgl_server.launch.restarts import MAX_FAILURES, wait_and_restart

TIMEOUT_S = 0.2


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    monkeypatch.setattr(replicas_module, "RUN_RANK", "children:hang")
    made = Supervisor()
    yield made
    made.terminate()


def start(supervisor: Supervisor, addresses: IpcAddresses, tp: int = 1) -> Replicas:
    config = EngineConfig.from_flat(model="m", platform="cpu", tp=tp)
    made = Replicas(config, Registry.from_environment(), supervisor, addresses, TIMEOUT_S)
    made.start()
    return made


def test_an_engine_that_hangs_ends_the_launch(supervisor: Supervisor) -> None:
    with IpcAddresses.create(1, 1) as addresses:
        replicas = start(supervisor, addresses)
        with pytest.raises(WorkerDiedError, match=r"'engine rank 0' was not ready within --startup-timeout 0.2"):
            wait_and_restart(supervisor, (replicas,), replicas.are_ready, None)


def test_no_rank_starts_after_a_failure(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_module, "RUN_RANK", "children:no_such_function")
    with IpcAddresses.create(1, 1) as addresses, pytest.raises(WorkerDiedError, match="no_such_function"):
        start(supervisor, addresses, tp=500)


def test_replicas_that_hang_are_restarted(supervisor: Supervisor, caplog: pytest.LogCaptureFixture) -> None:
    with IpcAddresses.create(1, 2) as addresses:
        replicas = start(supervisor, addresses)
        with pytest.raises(WorkerDiedError, match="was killed"):
            wait_and_restart(supervisor, (replicas,), replicas.are_ready, None)
    assert caplog.text.count("is restarted") >= MAX_FAILURES - 1


def test_replicas_of_ray_serve_do_not_wait_for_hung_engines(supervisor: Supervisor) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    from minisgl_server.ray.engine import Engine

    with IpcAddresses.create(1, 1) as addresses:
        engine: Any = SimpleNamespace(_supervisor=supervisor, _engine=start(supervisor, addresses))
        engine._engine.start = lambda: None  # the engine has started
        with pytest.raises(WorkerDiedError, match="was killed"):
            asyncio.run(asyncio.wait_for(asyncio.to_thread(Engine._start, engine), 60))
