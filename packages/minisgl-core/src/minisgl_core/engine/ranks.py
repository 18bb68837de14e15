"""The other ranks of an engine whose rank 0 is this process."""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Protocol

from minisgl_core.config.options import EngineConfig
from minisgl_core.contracts.communicator import Communicator
from minisgl_core.contracts.executor import RankPlacement
from minisgl_core.engine.build import BuiltEngine
from minisgl_core.engine.worker import run_worker
from minisgl_core.errors import WorkerDiedError
from minisgl_core.executors.select import make_executor
from minisgl_core.ipc import Endpoints, Sender, send_all
from minisgl_core.messages import Stop
from minisgl_core.plugins.registry import Registry
from minisgl_core.process import GRACE_S, Supervisor


class Build(Protocol):
    """Builds rank 0's engine, where everything else about it is known."""

    def __call__(self, *, placement: RankPlacement, joined: Callable[[Communicator], None]) -> BuiltEngine:
        """See `build_engine`."""


class OtherRanks:
    """Ranks 1 to tp - 1, a process each, which run the plans that this process sends.

    Attributes:
        followers: take the plans.
    """

    def __init__(self, config: EngineConfig, registry: Registry) -> None:
        """Start the processes; they wait for rank 0."""
        size = config.parallel.tp
        self._communicator: Communicator | None = None
        self._failure = ""
        self._has_failed = threading.Event()
        log_level = "info" if logging.getLogger(__name__).isEnabledFor(logging.INFO) else None
        with ExitStack() as stack:
            endpoints = stack.enter_context(Endpoints.create())
            self._supervisor = Supervisor(endpoints.directory, log_level)
            stack.callback(self._supervisor.terminate)
            executor = make_executor(config, registry, self._supervisor.start)
            placements = executor.place(size, endpoints.directory)
            self._placement = placements[0]
            for each in placements[1:]:
                arguments = config, placements, each.rank, endpoints
                executor.start(f"scheduler rank {each.rank}", each, run_worker, *arguments)
            self.followers = [stack.enter_context(Sender(each.address)) for each in placements[1:]]
            self._stack = stack.pop_all()

    def join(self, build: Build) -> BuiltEngine:
        """Build rank 0's engine while the others build theirs, wait for all, and watch them from then on.

        `build` runs in a thread: it waits for the other ranks, and one that has ended will never come.

        Raises:
            MinisglError: what `build` raised.
            WorkerDiedError: another rank failed.
        """
        built: Future[BuiltEngine] = Future()
        reader, writer = os.pipe()

        def run() -> None:
            try:
                built.set_result(build(placement=self._placement, joined=self._joined))
            except BaseException as error:
                # Its frames hold the model, which whoever catches the error may want the memory of.
                traceback.clear_frames(error.__traceback__)
                built.set_exception(error)
            finally:
                os.close(writer)

        thread = threading.Thread(target=run, name="build rank 0", daemon=True)
        try:
            thread.start()
            self._supervisor.wait(built.done, wake=reader)
            if isinstance(built.exception(), RuntimeError):
                self._supervisor.wait(timeout_s=GRACE_S)  # a connection breaks before the end of its rank is known
            result = built.result()
            self._supervisor.wait_ready()
        except BaseException:
            self.abort()
            self._supervisor.terminate()
            thread.join(GRACE_S)
            if built.done() and built.exception() is None:
                built.result().engine.close()
            raise
        finally:
            os.close(reader)
        self._watch()
        return result

    def _joined(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def _watch(self) -> None:
        """From now on, notice the end of a rank at once, also while this process waits for it on the device."""
        reader, writer = os.pipe()

        def watch() -> None:
            try:
                self._supervisor.wait(wake=reader)
            except WorkerDiedError as error:
                self._failure = str(error)
                self._has_failed.set()
                self.abort()
            except OSError:
                pass  # the interpreter ends, and the pipes were closed meanwhile

        thread = threading.Thread(target=watch, name="watch the ranks", daemon=True)
        thread.start()
        self._stack.callback(os.close, reader)
        self._stack.callback(thread.join)
        self._stack.callback(os.close, writer)

    def check(self, grace_s: float = 0.0) -> None:
        """Raise if a rank has ended.

        Raises:
            WorkerDiedError: one has, or does within `grace_s`.
        """
        if self._has_failed.wait(grace_s) if grace_s else self._has_failed.is_set():
            raise WorkerDiedError(self._failure)

    def abort(self) -> None:
        """End this rank's waiting for the others on the device; nothing can be computed any more."""
        if self._communicator is not None:
            # It may wait until the engine has freed its graphs.
            threading.Thread(target=self._communicator.abort, name="abort", daemon=True).start()

    def stop(self) -> None:
        """Have the ranks end in their own time. Fine to call twice."""
        followers, self.followers = self.followers, []
        send_all(followers, Stop())

    def close(self) -> None:
        """End the processes. Fine to call twice."""
        self.stop()
        self._stack.close()
