"""How a rank's process ends: its engine is closed, and after an error the other ranks are not waited for."""

from __future__ import annotations

import pytest
import tiny

from minisgl_core.config.options import EngineConfig
from minisgl_core.contracts.communicator import SingleRank
from minisgl_core.engine import worker
from minisgl_core.engine.engine import Engine
from minisgl_core.ipc import Endpoints, Sender
from minisgl_core.messages import Ready, Stop

CONFIG = EngineConfig.from_flat(
    model=str(tiny.checkpoint()), platform="cpu", dtype="float32", max_seq_len_override=tiny.MAX_SEQ_LEN, num_pages=64
)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done at the end, in order."""
    done: list[str] = []
    close, abort, send_all = Engine.close, SingleRank.abort, worker.send_all
    monkeypatch.setattr(Engine, "close", lambda self: (done.append("close"), close(self))[1])
    monkeypatch.setattr(SingleRank, "abort", lambda self: (done.append("abort"), abort(self))[1])
    monkeypatch.setattr(worker, "send_all", lambda *message: (done.append("stop the others"), send_all(*message))[1])
    return done


def run(messages: list[Stop]) -> None:
    with Endpoints.create() as endpoints:

        def report(ready: Ready) -> None:
            with Sender(endpoints.scheduler_in) as sender:
                for message in messages:
                    sender.send(message)

        worker.run_worker(CONFIG, 0, endpoints, report)


def test_a_rank_that_is_told_to_stop_closes_its_engine_when_the_others_know(ends: list[str]) -> None:
    run([Stop()])
    assert ends == ["stop the others", "close"]


def test_a_rank_that_fails_waits_for_nobody(ends: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("by and by")

    monkeypatch.setattr(worker, "_serve", fail)
    with pytest.raises(RuntimeError, match="by and by"):
        run([])
    assert ends == ["stop the others", "abort"]
