"""Starts the processes of a server, supervises them, and stops them."""

import errno
import json
import logging
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import click
import msgspec
import setproctitle

from minisgl_core.config.options import EngineConfig
from minisgl_core.config.provider_picker import check_providers
from minisgl_core.engine.kernel_compiler import start_kernel_compiler, stop_kernel_compiler
from minisgl_core.engine.startup_timer import StartupTimer, process_age_s
from minisgl_core.errors import InvalidValueError, WorkerDiedError
from minisgl_core.plugins.registry import Registry
from minisgl_core.protocol.messages import EngineInfo, Stop
from minisgl_core.runtime.ipc import IpcAddresses, Sender, send_all
from minisgl_core.runtime.supervisor import GRACE_S, Supervisor
from minisgl_core.utils import logs
from minisgl_core.utils.exit_status import describe_exit
from minisgl_core.weights.model_source import locate_model
from minisgl_server.launch.allowed_hosts import allowed_hosts
from minisgl_server.launch.api_keys import API_KEY_VARIABLE, api_key_digests
from minisgl_server.launch.api_workers import ApiWorkers, check_api_workers
from minisgl_server.launch.replicas import ROUTER, Replicas
from minisgl_server.launch.restarts import wait_and_restart
from minisgl_server.launch.stop_signals import StopSignals, exit_on_signal
from minisgl_server.launch.tp_check import check_tp
from minisgl_server.metrics.engine_metrics import prepare_metrics
from minisgl_server.options import ServerOptions
from minisgl_server.router.cache_events import ROUTER_EVENTS_VARIABLE
from minisgl_server.tokenizer import RUN_TOKENIZER

logger = logging.getLogger(__name__)

RUN_ROUTER = "minisgl_server.router.process:run_router"
DRAIN_SLACK_S = 5.0
"""Time beyond ``--drain-timeout`` that the API server has to stop."""


def serve(config: EngineConfig, options: ServerOptions, registry: Registry) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP, then let running requests finish. A second signal stops the server at once.

    Options, model and port are checked before any process starts. All processes start together; the API server answers 503
    until the engine and the tokenizer workers are ready. If a process fails, all have ended when its error is raised.
    """
    setproctitle.setproctitle("minisgl: launch")
    logs.configure("launch", options.log_level, options.log_format)
    timer = StartupTimer(process_age_s())
    with exit_on_signal():
        check_providers(config.flat(), registry)
        registry.entry("router", options.router)
        digests = api_key_digests(options)
        check_api_workers(options)
        options = replace(options, api_key=())  # the child processes get the digests only
        os.environ.pop(API_KEY_VARIABLE, None)
        check_tp(config, locate_model(config.model), registry)
    timer.done("checked the options")
    with (
        listen(options.host, options.port) as listener,
        IpcAddresses.create(
            options.num_tokenizers or options.api_workers, options.replicas, options.api_workers
        ) as addresses,
        StopSignals() as signals,
    ):
        options = replace(options, allowed_hosts=allowed_hosts(options, listener.getsockname()[0]))
        prepare_metrics(addresses.directory, options.metrics, options.served_model_name)
        supervisor = Supervisor(addresses.directory, options.log_level, options.log_format)
        compiler = None
        apis = ApiWorkers(options, digests, supervisor, addresses, listener)
        replicas: Replicas | None = None
        try:
            apis.start()
            url = f"http://{url_host(options.host)}:{listener.getsockname()[1]}"
            if options.api_workers == 1:
                listener.close()  # the worker has a copy, and no restarted one needs this socket
            if options.replicas > 1:
                if registry.load("router", options.router).uses_events:
                    os.environ[ROUTER_EVENTS_VARIABLE] = addresses.router_events  # the engines report events to it
                supervisor.start(ROUTER, RUN_ROUTER, options, addresses)
            replicas = Replicas(config, registry, supervisor, addresses, options.startup_timeout, apis.broadcast)
            replicas.start()
            for index, name in enumerate(_tokenizers(addresses)):
                supervisor.start(name, RUN_TOKENIZER, config, options, index, addresses)
            timer.done("started the processes")
            wait = partial(wait_and_restart, supervisor, (replicas, apis), wake=signals)
            if _wait_ready(supervisor, replicas, apis, addresses, wait, timer):
                _print(banner(supervisor, options, url, needs_key=bool(digests)))
                compiler = _compile_in_background(config, options, supervisor)
                wait(lambda: False)  # until a signal
                _drain(replicas, apis, options, wait, signals)
                supervisor.check_ended()
                if replicas.drain_error is not None:
                    raise replicas.drain_error
        except WorkerDiedError:
            apis.broadcast(Stop())  # running requests fail, as there will be no more output
            raise
        finally:
            if compiler is not None:
                stop_kernel_compiler(compiler)
            supervisor.terminate(GRACE_S if signals.count < 2 else 0.0)
            if replicas is not None:
                replicas.close()
            apis.close()


def _compile_in_background(
    config: EngineConfig, options: ServerOptions, supervisor: Supervisor
) -> subprocess.Popen[bytes] | None:
    """Start the compilation of kernels that ``auto`` would prefer. Return its process; None if it has nothing to do."""
    uncompiled = _uncompiled(supervisor)
    if uncompiled and config.parallel.executor == "local":
        with suppress(OSError):  # there is no memory for a process, and the server does not need it
            compiler = start_kernel_compiler(config, options.log_level, options.log_format, background=True)
            _print(f"{uncompiled} is compiled in the background for the next start.")
            return compiler
    return None


def compile_only(config: EngineConfig, options: ServerOptions, registry: Registry) -> None:
    """Start an engine, which compiles the kernels that it uses, then compile those that ``auto`` would prefer.

    If a signal ends this, the exit status is 128 plus its number, as in shells.
    """
    setproctitle.setproctitle("minisgl: launch")
    logs.configure("launch", options.log_level, options.log_format)
    with exit_on_signal():
        check_providers(config.flat(), registry)
        check_tp(config, locate_model(config.model), registry)
    with IpcAddresses.create(1, 1) as addresses, StopSignals() as signals:
        supervisor = Supervisor(addresses.directory, options.log_level, options.log_format)
        replicas = Replicas(config, registry, supervisor, addresses)
        try:
            replicas.start()
            if not supervisor.wait(replicas.are_ready, wake=signals):
                raise SystemExit(128 + signals.last)
            uncompiled = _uncompiled(supervisor)
        finally:
            supervisor.terminate()
            replicas.close()
    if uncompiled and (
        status := start_kernel_compiler(config, options.log_level, options.log_format, background=False).wait()
    ):
        raise WorkerDiedError(f"The process 'kernel compiler' {describe_exit(status)}.", "kernel compiler")
    _print("All kernels for these options are compiled.")


def _engine_info(supervisor: Supervisor) -> EngineInfo:
    """Return the description of the first engine that is ready; those of all replicas are alike."""
    return next(ready.engine_info for ready in supervisor.ready.values() if ready.engine_info is not None)


def _uncompiled(supervisor: Supervisor) -> str:
    """Return the names of the attention backends to compile, or nothing."""
    return ", ".join(f"--attn {name}" for name in _engine_info(supervisor).uncompiled)


def banner(supervisor: Supervisor, options: ServerOptions, url: str, *, needs_key: bool) -> str:
    """Return the banner: the model, the selected providers with reasons, the URL and an example request."""
    info = _engine_info(supervisor)
    name = options.served_model_name or info.model
    rows = [("model", f"{name} ({info.architecture}, {info.dtype} on {info.device})", "")]
    rows += [(option, value, reason) for option, value, reason in info.choices]
    rows += [("context", f"{info.max_seq_len} tokens", "")]
    if options.replicas > 1:
        rows += [("replicas", str(options.replicas), f"behind the router {options.router}")]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{name:<{widths[0]}}  {value:<{widths[1]}}  {reason}".rstrip() for name, value, reason in rows]
    question = {"role": "user", "content": "What is the capital of Germany?"}
    body: dict[str, Any]
    path, body = "chat/completions", {"messages": [question], "max_tokens": 32, "temperature": 0}
    if not any(ready.has_chat_template for ready in supervisor.ready.values()):
        path, body = "completions", {"prompt": "The capital of France is", "max_tokens": 32, "temperature": 0}
    headers = f"-H {shlex.quote('Content-Type: application/json')}"
    if needs_key:
        # The shell expands this to the first key of the variable.
        headers += f' -H "Authorization: Bearer ${{{API_KEY_VARIABLE}%% *}}"'
    curl = f"curl {url}/v1/{path} {headers} -d {shlex.quote(json.dumps(body))}"
    web_ui = [f"Chat and live view of the engine: {url}/"] if options.web_ui else []
    return "\n".join([*lines, "", f"Serving at {url}/v1", *web_ui, curl])


def _wait_ready(
    supervisor: Supervisor,
    replicas: Replicas,
    apis: ApiWorkers,
    addresses: IpcAddresses,
    wait: Callable[..., bool],
    timer: StartupTimer,
) -> bool:
    """Wait until engines, router, tokenizer workers and API server are ready, in this order. Return False on a signal."""
    if not wait(replicas.are_ready):
        return False
    timer.done("waited for the engine")
    info = replicas.mark_ready()
    if addresses.num_replicas > 1:
        with Sender(addresses.router_in) as router:
            router.send(info)
        if not wait(lambda: ROUTER in supervisor.ready):
            return False
    with ExitStack() as stack:
        send_all([stack.enter_context(Sender(address)) for address in addresses.tokenizer_in], info)
        if not wait(lambda: supervisor.ready.keys() >= set(_tokenizers(addresses))):
            return False
    timer.done("waited for the tokenizer workers")
    max_token_bytes = max(supervisor.ready[name].max_token_bytes for name in _tokenizers(addresses))
    replicas.info = msgspec.structs.replace(info, max_token_bytes=max_token_bytes)
    apis.broadcast(replicas.info)
    if not wait(apis.is_ready):
        return False
    timer.done("waited for the API server")
    logger.info("ready %.1f s after the command", sum(timer.seconds.values()))
    return True


def _drain(
    replicas: Replicas, apis: ApiWorkers, options: ServerOptions, wait: Callable[..., bool], signals: StopSignals
) -> None:
    """Let the API server finish the running requests; it refuses new ones. A second signal ends the wait."""
    signals.clear()
    replicas.drain()
    _print(f"Stopping: running requests have {options.drain_timeout:g} s to finish. A second signal ends them now.")
    apis.drain()
    wait(apis.have_ended, timeout_s=options.drain_timeout + DRAIN_SLACK_S)


def _print(text: str) -> None:
    """Print a line. If standard output cannot be written, such as on a full disk, nothing more is printed."""
    try:
        click.echo(text)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tokenizers(addresses: IpcAddresses) -> list[str]:
    return [f"tokenizer {index}" for index in range(addresses.num_tokenizers)]


def listen(host: str, port: int) -> socket.socket:
    """Listen on the port. This comes first, so that a port in use is reported before a model is loaded."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "It is not a valid host name"
        raise InvalidValueError("--host", host, "an address of this machine", f"{reason}.") from None
    try:
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        remedy = " Port 0 chooses a free one." if error.errno == errno.EADDRINUSE else ""
        remedy = f"{os.strerror(error.errno or 0)}.{remedy}"
        raise InvalidValueError("--host and --port", f"{host}:{port}", "free to listen on", remedy) from None


def url_host(host: str) -> str:
    """Return the host for a URL that works on this machine."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{reachable}]" if ":" in reachable else reachable
