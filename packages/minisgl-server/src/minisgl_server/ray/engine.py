"""Deployment Engine: each replica runs the ranks of one engine."""

import asyncio
import logging
import os
import signal
import sys
import threading
from typing import Any, NamedTuple

import numpy as np
from ray import serve

from minisgl_core.config.options import EngineConfig
from minisgl_core.errors import WorkerDiedError
from minisgl_core.plugins.registry import Registry
from minisgl_core.protocol.messages import (
    Abort,
    CacheEvents,
    EngineInfo,
    Rejected,
    RequestCounts,
    Submit,
    TokenBatch,
    TokenOut,
    decoder,
    encode,
)
from minisgl_core.runtime.ipc import AsyncReceiver, IpcAddresses, Sender
from minisgl_core.runtime.supervisor import Supervisor
from minisgl_core.utils import logs
from minisgl_server.launch.replicas import Replicas
from minisgl_server.launch.restarts import wait_and_restart
from minisgl_server.metrics.endpoint import Families, collect_local
from minisgl_server.metrics.engine_metrics import prepare_metrics
from minisgl_server.options import ServerOptions
from minisgl_server.ray.connections import Connections
from minisgl_server.router.cache_events import ROUTER_EVENTS_VARIABLE

logger = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
"""Interval of the heartbeats to each caller."""
HEALTH_CHECK_S = 15.0
"""Longest time that the scheduler may take to answer a health check."""
MAX_MISSED_CHECKS = 3
"""Missed health checks in a row after which the replica ends."""


class Route(NamedTuple):
    """Destination of a request's output: address of the caller, its tokenizer worker, and the id that it gives this engine."""

    address: str
    worker: int
    engine_id: int


class _Running(NamedTuple):
    route: Route
    ended: asyncio.Future[None]


class Engine:
    """Replica with one engine. A replica whose engine fails ends itself, and Serve starts another one."""

    async def __init__(self, config: EngineConfig, options: ServerOptions) -> None:  # type: ignore[misc]
        prepare_process("engine", options)
        registry = Registry.from_environment()
        self._addresses = IpcAddresses.create()
        prepare_metrics(self._addresses.directory, options.metrics, options.served_model_name)
        if registry.load("router", options.router).uses_events:
            os.environ[ROUTER_EVENTS_VARIABLE] = self._addresses.router_events
        self._supervisor = Supervisor(self._addresses.directory, options.log_level, options.log_format)
        timeout_s = options.startup_timeout
        self._replicas = Replicas(config, registry, self._supervisor, self._addresses, timeout_s)
        self._running: dict[str, _Running] = {}
        self._callers = Connections()
        self._health: asyncio.Future[None] | None = None
        self._num_missed_checks = 0
        self._decode = decoder(Submit)
        try:
            info = await asyncio.to_thread(self._start)
        except BaseException:
            self._supervisor.terminate()
            self._replicas.close()
            self._addresses.remove()
            raise
        self._info = encode(info)
        self._scheduler = Sender(self._addresses.scheduler_in)
        tasks = (self._forward_output(), self._forward_events(), self._send_heartbeats())
        self._tasks = [asyncio.create_task(each) for each in tasks]
        threading.Thread(target=self._watch, name="minisgl: watch", daemon=True).start()

    def _start(self) -> EngineInfo:
        self._replicas.start()
        wait_and_restart(self._supervisor, (self._replicas,), self._replicas.are_ready, wake=None)
        return self._replicas.mark_ready()

    def _watch(self) -> None:
        """End this replica with its engine: its calls fail, and the callers send them to another replica."""
        try:
            self._supervisor.wait()
        except WorkerDiedError as error:
            logger.error("%s The replica ends.", error)
        self._addresses.remove()
        os._exit(1)

    def __del__(self) -> None:
        """Remove the sockets. Serve calls this when the replica has stopped, and then kills this process and its children."""
        self._addresses.remove()

    async def describe(self) -> bytes:
        """Return the engine's encoded `EngineInfo`."""
        return self._info

    async def metrics(self, *, replica_id: str) -> tuple[str, Families]:
        """Return the id of this replica and its metrics. The callers' router sends the call to `replica_id`."""
        return serve.get_replica_context().replica_id.unique_id, await collect_local()

    async def generate(self, *, request_id: str, submit: bytes, address: str, engine_id: int = -1) -> None:
        """Run a request, and return once all its output has been sent. Cancelling the call aborts the request.

        The output goes to `address`, the caller's, which gives this engine the id `engine_id`.
        """
        message: Submit = self._decode(submit)
        ended = asyncio.get_running_loop().create_future()
        self._running[request_id] = _Running(Route(address, message.worker, engine_id), ended)
        message.worker = 0  # the output comes to `_forward_output`, which finds the route
        with self._callers.use(address):
            self._scheduler.send(message)
            try:
                await ended
            except asyncio.CancelledError:
                self._scheduler.send(Abort(request_id))
                raise
            finally:
                self._running.pop(request_id, None)

    async def check_health(self) -> None:
        """Wait until the scheduler answers, and close idle connections. Serve calls this every few seconds.

        Serve itself would let the running requests of an unhealthy replica finish, which they do not if the scheduler hangs. So
        this kills the scheduler, and `_watch` ends the replica.
        """
        for task in self._tasks:
            if task.done():
                task.result()
        self._health = asyncio.get_running_loop().create_future()
        self._scheduler.send(RequestCounts(worker=0))
        try:
            await asyncio.wait_for(self._health, HEALTH_CHECK_S)
        except TimeoutError:
            self._num_missed_checks += 1
            if self._num_missed_checks == MAX_MISSED_CHECKS:
                logger.error(
                    "The scheduler has not answered for %g s, and is killed.", MAX_MISSED_CHECKS * HEALTH_CHECK_S
                )
                os.kill(self._supervisor.pid("engine rank 0"), signal.SIGKILL)
            raise
        self._num_missed_checks = 0
        self._callers.close_idle()

    async def _forward_output(self) -> None:
        """Send the output of each step to the callers of its requests."""
        receiver = AsyncReceiver[Any](self._addresses.tokenizer_in[0], TokenBatch | Rejected | RequestCounts)
        while True:
            match await receiver.receive():
                case TokenBatch() as batch:
                    self._split(batch)
                case Rejected(request_id=request_id) as message:
                    if running := self._running.get(request_id):
                        message.engine_id = running.route.engine_id
                        self._send(running.route, message)
                        self._end(running)
                case RequestCounts() if self._health is not None and not self._health.done():
                    self._health.set_result(None)

    def _split(self, batch: TokenBatch) -> None:
        outputs: dict[Route, list[TokenOut]] = {}
        tokens: dict[Route, tuple[list[str], list[int]]] = {}
        ended = []
        for request_id, token in zip(batch.request_ids, batch.token_ids.tolist(), strict=True):
            if running := self._running.get(request_id):
                request_ids, token_ids = tokens.setdefault(running.route, ([], []))
                request_ids.append(request_id)
                token_ids.append(token)
        for out in batch.outputs:
            if running := self._running.get(out.request_id):
                outputs.setdefault(running.route, []).append(out)
                if out.finish_reason is not None:
                    ended.append(running)
        for route in outputs.keys() | tokens.keys():
            request_ids, token_ids = tokens.get(route, ([], []))
            part = TokenBatch(outputs.get(route, []), route.engine_id, request_ids, np.array(token_ids, np.int32))
            self._send(route, part)
        for running in ended:
            self._end(running)

    def _send(self, route: Route, message: TokenBatch | Rejected) -> None:
        self._callers.sender(route.address).socket.send_multipart([route.worker.to_bytes(1), encode(message)])

    @staticmethod
    def _end(running: _Running) -> None:
        if not running.ended.done():
            running.ended.set_result(None)

    async def _forward_events(self) -> None:
        """Send the events of the prefix cache to all callers."""
        receiver = AsyncReceiver[Any](self._addresses.router_events, CacheEvents)
        while True:
            self._send_to_all(await receiver.socket.recv())

    async def _send_heartbeats(self) -> None:
        """Send an empty message to all callers, which treat an engine without heartbeats as lost."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._send_to_all(b"")

    def _send_to_all(self, message: bytes) -> None:
        replica_id = serve.get_replica_context().replica_id.unique_id.encode()
        for sender in self._callers.senders():
            sender.socket.send_multipart([replica_id, message])


def prepare_process(name: str, options: ServerOptions) -> None:
    """Set up logging, and child processes, in a worker process of Ray."""
    logs.configure(name, options.log_level, options.log_format)
    # A child would run Ray's main module again, as multiprocessing does to find functions of the main module.
    sys.modules["__main__"].__dict__.pop("__file__", None)
