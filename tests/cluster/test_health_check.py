"""Health checks of the deployment Engine, without a cluster."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="ray is not installed")

from minisgl_core.protocol.messages import RequestCounts
from minisgl_server.ray import engine as engine_module
from minisgl_server.ray.connections import Connections
from minisgl_server.ray.engine import MAX_MISSED_CHECKS, Engine


@pytest.fixture
def scheduler() -> Iterator[subprocess.Popen[bytes]]:
    """Process in place of the scheduler."""
    process = subprocess.Popen(["sleep", "100"])
    yield process
    process.kill()
    process.wait()


async def test_a_scheduler_that_misses_checks_in_a_row_is_killed(
    scheduler: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "HEALTH_CHECK_S", 0.05)
    engine = Engine.__new__(Engine)
    engine._addresses = SimpleNamespace(remove=lambda: None)  # type: ignore[assignment]
    engine._supervisor = SimpleNamespace(pid={"engine rank 0": scheduler.pid}.get)  # type: ignore[assignment]
    engine._running, engine._callers, engine._num_missed_checks, engine._tasks = {}, Connections(), 0, []
    answers = False

    def send(message: RequestCounts) -> None:
        assert engine._health is not None
        if answers:
            engine._health.set_result(None)

    engine._scheduler = SimpleNamespace(send=send)  # type: ignore[assignment]
    for num_missed in (MAX_MISSED_CHECKS - 1, MAX_MISSED_CHECKS - 1, MAX_MISSED_CHECKS):
        assert scheduler.poll() is None
        answers = True
        await engine.check_health()
        answers = False
        for _ in range(num_missed):
            with pytest.raises(TimeoutError):
                await engine.check_health()
    assert scheduler.wait(5) == -9


async def test_a_replica_whose_task_has_failed_is_unhealthy() -> None:
    async def fail() -> None:
        raise RuntimeError("broken message")

    engine = Engine.__new__(Engine)
    engine._addresses = SimpleNamespace(remove=lambda: None)  # type: ignore[assignment]
    engine._tasks = [asyncio.create_task(fail())]
    await asyncio.wait(engine._tasks)
    with pytest.raises(RuntimeError, match="broken message"):
        await engine.check_health()
