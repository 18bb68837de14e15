"""Processes of ranks 1 and up, for an engine whose rank 0 is in this process, as with `LLM`."""

import logging
import os
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack

from minisgl_core.config.options import EngineConfig
from minisgl_core.contracts.communicator import Communicator
from minisgl_core.engine.build import BuiltModelRunner
from minisgl_core.errors import WorkerDiedError
from minisgl_core.plugins.registry import Registry
from minisgl_core.protocol.messages import Stop
from minisgl_core.runtime.executor_selection import make_executor
from minisgl_core.runtime.ipc import IpcAddresses, Receiver, Sender, send_all
from minisgl_core.runtime.supervisor import GRACE_S, Supervisor
from minisgl_core.runtime.worker import FromLastStage, run_worker


class OtherRanks:
    """Processes of all ranks but rank 0, which run the plans that this process sends.

    Attributes:
        plan_senders: one per rank.
        results: receiver of the last pipeline stage's results; None with one stage.
    """

    def __init__(self, config: EngineConfig, registry: Registry) -> None:
        """Start the processes, which wait for rank 0."""
        self.results: Receiver[FromLastStage] | None = None
        self._communicators: list[Communicator] = []
        self._failure = ""
        self._has_failed = threading.Event()
        log_level = "info" if logging.getLogger(__name__).isEnabledFor(logging.INFO) else None
        with ExitStack() as stack:
            addresses = stack.enter_context(IpcAddresses.create())
            self._supervisor = Supervisor(addresses.directory, log_level)
            executor = make_executor(config, registry, self._supervisor)
            stack.callback(executor.close)
            stack.callback(self._supervisor.terminate)
            placements = executor.place(addresses.directory)
            self._placement = placements[0]
            if config.parallel.pp > 1:
                self.results = stack.enter_context(Receiver[FromLastStage](self._placement.address, FromLastStage))
            for each in placements[1:]:
                arguments = config, placements, each.rank, addresses
                executor.start(f"engine rank {each.rank}", each, run_worker, *arguments)
            self.plan_senders = [stack.enter_context(Sender(each.address)) for each in placements[1:]]
            self._stack = stack.pop_all()

    def join(self, build: Callable[..., BuiltModelRunner]) -> BuiltModelRunner:
        """Build rank 0's model runner while the others build theirs, wait for all ranks, and watch them afterwards.

        `build` is `build_model_runner` without the arguments `placement` and `on_joined`. It runs in a thread, because it waits
        for the other ranks and would wait forever for one that has ended. If one ends, this raises WorkerDiedError.
        """
        built: Future[BuiltModelRunner] = Future()
        reader, writer = os.pipe()

        def run() -> None:
            try:
                built.set_result(build(placement=self._placement, on_joined=self._communicators.append))
            except BaseException as error:
                # The frames refer to the model, whose memory the caller may need after this error.
                traceback.clear_frames(error.__traceback__)
                built.set_exception(error)
            finally:
                os.close(writer)

        thread = threading.Thread(target=run, name="build rank 0", daemon=True)
        try:
            thread.start()
            self._supervisor.wait(built.done, wake=reader)
            if isinstance(built.exception(), RuntimeError):
                # The connection to a rank may break before the supervisor sees its end. If it ends, raise its error instead.
                self._supervisor.wait(timeout_s=GRACE_S)
            result = built.result()
            self._supervisor.wait_ready()
        except BaseException:
            self.abort()
            self._supervisor.terminate()
            thread.join(GRACE_S)
            if built.done() and built.exception() is None:
                built.result().model_runner.close()
            raise
        finally:
            os.close(reader)
        self._watch()
        return result

    def _watch(self) -> None:
        """Watch the ranks in a thread, so that the end of one is noticed while this process waits for the device."""
        reader, writer = os.pipe()

        def watch() -> None:
            try:
                self._supervisor.wait(wake=reader)
            except WorkerDiedError as error:
                self._failure = str(error)
                self._has_failed.set()
                self.abort()
                if self.results is not None:
                    with Sender(self._placement.address) as wake:
                        wake.send(Stop())
            except OSError:
                pass  # the interpreter is ending and has closed the pipes

        thread = threading.Thread(target=watch, name="watch the ranks", daemon=True)
        thread.start()
        self._stack.callback(os.close, reader)
        self._stack.callback(thread.join)
        self._stack.callback(os.close, writer)

    def check(self, grace_s: float = 0.0) -> None:
        """Raise WorkerDiedError if another rank has ended, or ends within `grace_s`."""
        if self._has_failed.wait(grace_s) if grace_s else self._has_failed.is_set():
            raise WorkerDiedError(self._failure)

    def abort(self) -> None:
        """Abort collectives that wait for other ranks. No step can run afterwards."""
        for communicator in self._communicators:
            # In a thread, since abort may wait until the model runner has freed its CUDA graphs.
            threading.Thread(target=communicator.abort, name="abort", daemon=True).start()

    def stop(self) -> None:
        """Tell the ranks to end. May be called twice."""
        plan_senders, self.plan_senders = self.plan_senders, []
        send_all(plan_senders, Stop())

    def close(self) -> None:
        """End the processes. May be called twice."""
        self.stop()
        self._stack.close()
