"""The API server's process."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn

from minisgl_core.ipc import Endpoints
from minisgl_core.messages import Ready
from minisgl_core.process import END_SIGNAL, Report
from minisgl_server.api.app import create_app
from minisgl_server.api.connections import Connections
from minisgl_server.api.engine_client import EngineClient
from minisgl_server.api.guard import guarded
from minisgl_server.api.protocol import protocol_class
from minisgl_server.options import ServerOptions

SEND_TIMEOUT_S = 2
"""What clients get at the end to take answers that are complete."""
OPEN_FILES = 65536
"""Each connection is one; what many systems allow a process at first, 1024, is soon reached."""


def run_api(
    options: ServerOptions, key_digests: list[bytes], endpoints: Endpoints, listener: socket.socket, report: Report
) -> None:
    """Body of the process: serve on `listener` until `END_SIGNAL`, then finish running requests for ``--drain-timeout``.

    It listens at once, answers 503 until it receives `EngineInfo`, and reports that it is ready then. While it drains, it
    listens on and answers 503 to whatever is new, so that who watches /ready sees it.
    """
    max_connections = max_open_files() * 7 // 8
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(options, key_digests, endpoints, listener, report, max_connections))


async def _serve(
    options: ServerOptions,
    key_digests: list[bytes],
    endpoints: Endpoints,
    listener: socket.socket,
    report: Report,
    max_connections: int,
) -> None:
    client = EngineClient(endpoints)
    connections = Connections(max_connections, options.max_connections_per_address)
    config = uvicorn.Config(
        guarded(create_app(client, options), options, key_digests),
        http=protocol_class(connections),
        ws="none",
        log_config=None,
        log_level=options.log_level,
        access_log=False,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=SEND_TIMEOUT_S,
        server_header=False,
    )
    server = _Server(config)

    def stop() -> None:
        tasks.append(asyncio.create_task(drain()))

    async def drain() -> None:
        await client.drain(options.drain_timeout)
        server.should_exit = True

    async def report_when_ready() -> None:
        await server.listens.wait()
        await client.ready.wait()
        report(Ready(process="api"))

    async def stop_with_engine() -> None:
        await client.stopped.wait()
        server.should_exit = True

    tasks: list[asyncio.Task[None]] = []
    asyncio.get_running_loop().add_signal_handler(END_SIGNAL, stop)
    tasks += [asyncio.create_task(report_when_ready()), asyncio.create_task(stop_with_engine())]
    try:
        await server.serve(sockets=[listener])
    finally:
        for task in tasks:
            task.cancel()
        client.close()


class _Server(uvicorn.Server):
    """Leaves signals to `_serve`, and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        self.listens.set()


def max_open_files() -> int:
    """Allow this process `OPEN_FILES`, or what the system lets it have at most, and return the number."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if most == resource.RLIM_INFINITY else min(OPEN_FILES, most)
    if now == resource.RLIM_INFINITY or now >= wanted:
        return OPEN_FILES if now == resource.RLIM_INFINITY else now
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    return wanted


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's event loop where it is installed: less time a message."""
    if sys.platform != "win32":
        with contextlib.suppress(ImportError):
            import uvloop

            return uvloop.new_event_loop
    return asyncio.new_event_loop
