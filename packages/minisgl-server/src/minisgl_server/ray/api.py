"""Deployment API: the application of `minisgl_server.api` and its tokenizer workers, in front of the deployment Engine."""

import asyncio
import logging
from contextvars import Context
from dataclasses import replace
from typing import Any

import msgspec
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from minisgl_core.config.options import EngineConfig
from minisgl_core.plugins.registry import Registry
from minisgl_core.protocol.engine_snapshot import SnapshotRequest
from minisgl_core.protocol.messages import (
    Abort,
    CacheEvents,
    Ended,
    EngineInfo,
    NoSnapshot,
    Rejected,
    ReplicaLost,
    RequestCounts,
    Submit,
    decoder,
    encode,
)
from minisgl_core.runtime.ipc import AsyncReceiver, IpcAddresses, Sender
from minisgl_core.runtime.supervisor import Supervisor
from minisgl_server.api.app import create_app
from minisgl_server.api.engine_client import EngineClient
from minisgl_server.api.http.middleware import add_middleware
from minisgl_server.metrics.endpoint import Families, merge
from minisgl_server.options import ServerOptions
from minisgl_server.ray import request_router
from minisgl_server.ray.connections import Connections, open_receiver
from minisgl_server.ray.direct_streams import DirectStreams
from minisgl_server.ray.engine import prepare_process
from minisgl_server.ray.request_router import HEARTBEAT_TIMEOUT_TICKS, RoutingTable
from minisgl_server.router.worker import make_router
from minisgl_server.tokenizer import RUN_TOKENIZER
from minisgl_server.tokenizer.worker import MAX_ATTEMPTS

logger = logging.getLogger(__name__)

OUTPUT_S = 10.0
"""Longest time from the end of a call to the arrival of the request's last output."""
METRICS_S = 5.0
"""Longest time that an engine may take to return its metrics."""
SPARE_ENTRIES = 8
"""Additional entries of the routing table: the entry of a stopping replica is not reused before its requests have ended."""
TICK_S = 1.0
"""Interval of `RoutingTable.tick`."""


def requests_per_replica(config: EngineConfig) -> int:
    """Return the number of requests that a replica of Engine takes: those that run, and as many that wait in its scheduler."""
    return 2 * config.scheduler.max_running_requests


@serve.ingress()
class API:
    """Replica of the API. It takes requests of the tokenizer workers in place of a router process.

    Args:
        options: options of the server. `replicas` is the maximum number of replicas.
        api_key_digests: see `add_middleware`.
        engines: the deployment Engine, or the name of the application that has it.
    """

    async def __init__(  # type: ignore[misc]
        self,
        config: EngineConfig,
        options: ServerOptions,
        api_key_digests: list[bytes],
        engines: DeploymentHandle | str,
    ) -> None:
        prepare_process("api", options)
        if isinstance(engines, str):
            engines = serve.get_deployment_handle("Engine", engines)
        self._engines, self._config, self._options, self._digests = engines, config, options, api_key_digests
        info: EngineInfo = decoder(EngineInfo)(await engines.describe.remote())
        with_spares = replace(options, replicas=options.replicas + SPARE_ENTRIES)
        self._table = RoutingTable(make_router(with_spares, info, Registry.from_environment()), info)
        request_router.table = self._table
        info = msgspec.structs.replace(info, max_requests=self._max_requests(options.replicas))
        self._addresses = IpcAddresses.create(options.num_tokenizers or 1, with_spares.replicas)
        self._supervisor = Supervisor(self._addresses.directory, options.log_level, options.log_format)
        self._workers = [Sender(address) for address in self._addresses.tokenizer_in]
        self._calls: dict[str, asyncio.Task[None]] = {}
        """Call of an engine, by request id."""
        self._ended: dict[str, asyncio.Event] = {}
        """Set when the tokenizer worker reports the end of a request, by request id."""
        self._attempts: dict[str, int] = {}
        """Number of engines that were lost with a request, by its id; requests that lost none are missing."""
        self._outputs, self._address = open_receiver(CacheEvents)
        self._proxies = Connections()
        self.client = EngineClient(self._addresses)
        names = [f"tokenizer {index}" for index in range(len(self._workers))]
        for index, name in enumerate(names):
            self._supervisor.start(name, RUN_TOKENIZER, config, options, index, self._addresses)
            self._workers[index].send(info)
        await asyncio.to_thread(self._supervisor.wait_ready)
        max_token_bytes = max(self._supervisor.ready[name].max_token_bytes for name in names)
        self.client.info = msgspec.structs.replace(info, max_token_bytes=max_token_bytes)
        self.client.ready.set()
        tasks = (self._take_requests(), self._take_outputs(), self._watch_engines())
        self._tasks = [asyncio.create_task(each) for each in tasks]

    def __del__(self) -> None:
        """Remove the sockets. Serve calls this when the replica has stopped, and then kills this process and its children."""
        self._addresses.remove()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application."""
        app = create_app(self.client, self._options, self._collect_metrics)
        return DirectStreams(add_middleware(app, self._options, self._digests), self._proxies)

    async def check_health(self) -> None:
        """Raise the error of a tokenizer worker that has ended, and close idle connections."""
        self._supervisor.wait(timeout_s=0)
        for task in self._tasks:
            if task.done():
                task.result()
        self._proxies.close_idle()

    async def _collect_metrics(self) -> Families:
        """Return the metrics of all engines that answer in time."""

        async def ask(replica_id: str) -> tuple[str, Families]:
            async with asyncio.timeout(METRICS_S):
                answer: tuple[str, Families] = await self._engines.metrics.remote(replica_id=replica_id)
            return answer

        # Serve finds the call to route by the request id in its context. With the context of this HTTP request, all calls would
        # have the same id.
        asked = [asyncio.create_task(ask(each), context=Context()) for each in request_router.replica_ids]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return merge(sorted({each[0]: each[1] for each in answers if not isinstance(each, BaseException)}.items()))

    async def _take_requests(self) -> None:
        """Handle the messages of the tokenizer workers, as the router's process does."""
        incoming = Submit | Abort | Ended | RequestCounts | SnapshotRequest
        receiver = AsyncReceiver[Any](self._addresses.router_in, incoming)
        while True:
            match await receiver.receive():
                # A request that is submitted again after a loss was accepted before.
                case Submit() as submit if self._is_full() and submit.request_id not in self._attempts:
                    self._reject(
                        submit, "queue_full", "no replica has room, and too many requests wait; try again later"
                    )
                case Submit() as submit:
                    self._calls[submit.request_id] = asyncio.create_task(self._call(submit))
                case Abort(request_id):
                    self._attempts.pop(request_id, None)
                    if request_id in self._calls:
                        self._calls[request_id].cancel()
                case Ended(request_ids):
                    for request_id in request_ids:
                        self._attempts.pop(request_id, None)
                        if request_id in self._ended:
                            self._ended[request_id].set()
                case RequestCounts() as message:
                    message.counts["router"] = len(self._calls)
                    self._workers[message.worker].send(message)
                case SnapshotRequest() as message:
                    self._workers[message.worker].send(NoSnapshot(message.correlation_id))

    def _is_full(self) -> bool:
        """Return True if no replica has room and too many requests wait.

        A limit of Serve's would count requests that arrive together as waiting, even if the replicas have room for them.
        """
        return len(self._calls) >= self._max_requests(len(request_router.replica_ids))

    def _max_requests(self, num_replicas: int) -> int:
        """Return the number of requests that run or wait at a time with this number of replicas."""
        return num_replicas * requests_per_replica(self._config) + self._config.scheduler.max_queued_requests

    async def _take_outputs(self) -> None:
        """Pass the engines' output on to the tokenizer workers, and events of their prefix caches to the router."""
        decode = decoder(CacheEvents)
        while True:
            source, message = await self._outputs.socket.recv_multipart()
            if len(source) == 1:  # index of a tokenizer worker; else the id of the replica that sends a heartbeat
                self._workers[source[0]].socket.send(message)
            else:
                self._table.heartbeat(source.decode())
                if message:
                    self._table.apply(source.decode(), decode(message))

    async def _watch_engines(self) -> None:
        """Treat engines that send no heartbeats as lost. Ray reports a node without network only after a minute."""
        while True:
            await asyncio.sleep(TICK_S)
            for submit in self._table.tick():
                logger.warning("lost a replica: no heartbeat for %g s", HEARTBEAT_TIMEOUT_TICKS * TICK_S)
                self._lose(submit)

    async def _call(self, submit: Submit) -> None:
        """Have an engine run a request. If the engine is lost, tell the tokenizer worker, which may submit it again."""
        request_id, ended = submit.request_id, asyncio.Event()
        self._ended[request_id] = ended
        self._table.begin(submit)
        call = self._engines.generate.remote(request_id=request_id, submit=encode(submit), address=self._address)
        try:
            await call
            await asyncio.wait_for(ended.wait(), OUTPUT_S)
        except asyncio.CancelledError:
            call.cancel()
            raise
        except RayTaskError:
            logger.exception("the engine failed to take the request", extra={"request_id": request_id})
            self._reject(submit, "internal", "The engine failed to take the request.")
        except (RayError, TimeoutError) as error:
            logger.warning("lost a replica: %s", next(iter(str(error).splitlines()), type(error).__name__))
            self._lose(submit)
        except Exception:
            logger.exception("no engine took the request", extra={"request_id": request_id})
            self._reject(submit, "replica_lost", "No replica can take the request. Please send it again.")
        finally:
            if self._ended.get(request_id) is ended:
                del self._ended[request_id], self._calls[request_id]
                self._table.end(request_id)

    def _lose(self, submit: Submit) -> None:
        """Tell the tokenizer workers which requests were lost with the engine of this one; they submit some of them again."""
        engine_id, lost = self._table.lose(submit.request_id)
        by_worker: dict[int, list[str]] = {index: [] for index in range(len(self._workers))}
        for each in lost:
            attempts = self._attempts[each.request_id] = self._attempts.get(each.request_id, 0) + 1
            if engine_id < 0:
                self._reject(each, "replica_lost", "No replica can take the request. Please send it again.")
            elif attempts < MAX_ATTEMPTS:
                by_worker[each.worker].append(each.request_id)
            else:
                self._reject(each, "replica_lost", f"{attempts} replicas have ended while they ran the request.")
            if (call := self._calls[each.request_id]) is not asyncio.current_task():
                call.cancel()
        for worker, request_ids in by_worker.items() if engine_id >= 0 else ():
            self._workers[worker].send(ReplicaLost(engine_id, request_ids))

    def _reject(self, submit: Submit, kind: str, message: str) -> None:
        reply = Rejected(request_id=submit.request_id, kind=kind, message=message, engine_id=-1)
        self._workers[submit.worker].send(reply)
