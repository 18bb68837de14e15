"""Main function of an API worker, a process of the API server."""

import asyncio
import contextlib
import mmap
import resource
import socket
from typing import Any

import uvicorn
import uvloop

from minisgl_core.protocol.messages import Ready
from minisgl_core.runtime.ipc import IpcAddresses
from minisgl_core.runtime.supervisor import END_SIGNAL, Report
from minisgl_server.api.app import create_app
from minisgl_server.api.engine_client import EngineClient
from minisgl_server.api.http.connection_limits import ConnectionLimits
from minisgl_server.api.http.limited_protocol import limited_protocol_class
from minisgl_server.api.http.middleware import add_middleware
from minisgl_server.options import ServerOptions

SEND_TIMEOUT_S = 2
"""Time that clients have to receive the rest of their responses when the server stops."""
OPEN_FILES = 65536
"""Limit of open files to ask for: each connection is one, and the default of many systems is only 1024."""


def run_api(*args: Any) -> None:
    """Call `serve_api` in an event loop."""
    uvloop.run(serve_api(*args))


async def serve_api(
    options: ServerOptions,
    api_key_digests: list[bytes],
    addresses: IpcAddresses,
    listener: socket.socket,
    report: Report,
) -> None:
    """Run one API worker until `END_SIGNAL`, then finish running requests for ``--drain-timeout``.

    All workers accept connections from `listener`, which already listens. A worker answers 503 until it receives `EngineInfo`;
    then it reports that it is ready. While it drains, it answers 503 to new requests, so that load balancers that poll /ready
    notice. `api_key_digests` are SHA-256 digests of the API keys.
    """
    client = EngineClient(addresses)
    with open(addresses.request_counts_file, "r+b") as file:
        request_counts = memoryview(mmap.mmap(file.fileno(), 0)).cast("i")
    max_connections = max_open_files() * 7 // 8  # the rest is for the sockets of the engine and other files
    connections = ConnectionLimits(max_connections, options.max_connections_per_address)
    config = uvicorn.Config(
        add_middleware(
            create_app(client, options), options, api_key_digests, request_counts, addresses.api_worker_index
        ),
        http=limited_protocol_class(connections),
        ws="none",
        log_config=None,
        log_level=options.log_level,
        access_log=False,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=SEND_TIMEOUT_S,
        server_header=False,
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]  # `drain` handles `END_SIGNAL`

    async def drain() -> None:
        await client.drain(options.drain_timeout)
        server.should_exit = True

    async def report_when_ready() -> None:
        await client.ready.wait()
        report(Ready(process="api"))

    async def stop_with_engine() -> None:
        await client.stopped.wait()
        server.should_exit = True

    tasks = [asyncio.create_task(report_when_ready()), asyncio.create_task(stop_with_engine())]
    asyncio.get_running_loop().add_signal_handler(END_SIGNAL, lambda: tasks.append(asyncio.create_task(drain())))
    try:
        await server.serve(sockets=[listener])
    finally:
        for task in tasks:
            task.cancel()
        client.close()


def max_open_files() -> int:
    """Raise this process's limit of open files to `OPEN_FILES`, or as far as the system allows, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    current, maximum = (OPEN_FILES if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))
    if current < (target := min(OPEN_FILES, maximum)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    return max(current, target)
