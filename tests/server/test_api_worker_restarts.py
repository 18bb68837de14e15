"""`RestartableProcesses` of API workers, without processes."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

from minisgl_core.errors import WorkerDiedError
from minisgl_core.protocol.messages import Stop
from minisgl_core.runtime.ipc import IpcAddresses
from minisgl_server.launch.api_workers import ApiWorkers
from minisgl_server.launch.restarts import MAX_FAILURES, SERVED_S
from minisgl_server.options import ServerOptions


class FakeSupervisor:
    """Supervisor that starts nothing."""

    def start(self, *_: Any) -> None:
        pass

    def discard(self, *_: Any) -> None:
        pass


@pytest.mark.nightly
def test_long_service_resets_the_number_of_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    supervisor: Any = FakeSupervisor()
    with IpcAddresses.create(num_tokenizers=2, num_api_workers=2) as endpoints, socket.socket() as listener:
        workers = ApiWorkers(ServerOptions(api_workers=2), [], supervisor, endpoints, listener)
        workers.start()
        workers.broadcast(Stop())
        died = [WorkerDiedError("It died.", name) for name in workers.names]
        for _ in range(MAX_FAILURES):
            for error in died:
                assert workers.handle_failure(error)
                workers.due_s.clear()
                workers.start_one(workers.names.index(error.process))
        now_s += SERVED_S
        assert workers.handle_failure(died[0]), "both have served since"
        workers.due_s.clear()
        workers.start_one(0)
        for _ in range(MAX_FAILURES):
            for error in died:
                workers.handle_failure(error)
                workers.due_s.clear()
                workers.start_one(workers.names.index(error.process))
        assert not workers.handle_failure(died[0])
        workers.close()
