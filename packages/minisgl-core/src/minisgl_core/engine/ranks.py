"""The other ranks of an engine whose rank 0 is this process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack

from minisgl_core.config.options import EngineConfig
from minisgl_core.engine.build import BuiltEngine
from minisgl_core.engine.worker import rendezvous, run_worker
from minisgl_core.ipc import Endpoints, Sender, send_all
from minisgl_core.messages import Stop
from minisgl_core.process import GRACE_S, Supervisor

LOOK_EVERY_S = 0.1


class OtherRanks:
    """Ranks 1 to tp - 1, a process each, which run the plans that this process sends.

    Attributes:
        init_method: where all ranks meet.
        followers: take the plans.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Start the processes; they wait for rank 0 at `init_method`."""
        size = config.parallel.tp
        self._next_look_s = 0.0
        with ExitStack() as stack:
            endpoints = stack.enter_context(Endpoints.create(num_ranks=size))
            self.init_method = rendezvous(endpoints)
            self._supervisor = Supervisor(endpoints.directory)
            stack.callback(self._supervisor.terminate)
            for rank in range(1, size):
                self._supervisor.start(f"scheduler rank {rank}", run_worker, config, rank, endpoints)
            self.followers = [stack.enter_context(Sender(address)) for address in endpoints.rank_in[1:]]
            self._stack = stack.pop_all()

    def join(self, build: Callable[[], BuiltEngine]) -> BuiltEngine:
        """Build rank 0's engine while the others build theirs, and wait for all.

        `build` runs in a thread: it waits for the other ranks, and one that has ended will never come.

        Raises:
            MinisglError: what `build` raised.
            WorkerDiedError: another rank failed.
        """
        built: Future[BuiltEngine] = Future()
        reader, writer = os.pipe()

        def run() -> None:
            try:
                built.set_result(build())
            except BaseException as error:
                built.set_exception(error)
            finally:
                os.close(writer)

        try:
            threading.Thread(target=run, name="build rank 0", daemon=True).start()
            self._supervisor.wait(built.done, wake=reader)
        finally:
            os.close(reader)
        if isinstance(built.exception(), RuntimeError):
            self.check(GRACE_S)  # the connection to a rank that has failed breaks before its end is known
        result = built.result()
        self._supervisor.wait_ready()
        return result

    def check(self, grace_s: float = 0.0) -> None:
        """Look whether all ranks run; without a `grace_s`, only if the last look is a while ago.

        Raises:
            WorkerDiedError: one has ended, or ends within `grace_s`.
        """
        now = time.monotonic()
        if grace_s or now > self._next_look_s:
            self._supervisor.wait(timeout_s=grace_s)
            self._next_look_s = now + LOOK_EVERY_S

    def close(self) -> None:
        """End the processes. Fine to call twice."""
        send_all(self.followers, Stop())
        self.followers = []
        self._stack.close()
