"""``minisgl launch --executor ray --replicas``: deploys the API and the engines, and ends them with the launcher.

The engines are an application of their own, with a new name for each launch. A second launch starts its engines
first. Then Serve replaces the API: its old replicas finish their requests with the old engines, which are removed last.
"""

import logging
import os
import re
import secrets
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import click
import setproctitle

from minisgl_core.config.options import EngineConfig
from minisgl_core.contracts.executor import ExecutorSpec
from minisgl_core.errors import ProviderUnsupportedError, WorkerDiedError
from minisgl_core.plugins.registry import Registry
from minisgl_core.protocol.messages import EngineInfo, decoder
from minisgl_server.launch.allowed_hosts import allowed_hosts
from minisgl_server.launch.api_workers import check_api_workers
from minisgl_server.launch.launcher import listen, url_host
from minisgl_server.launch.stop_signals import stop_signals
from minisgl_server.options import ServerOptions
from minisgl_server.ray import API_APP, SERVE_ENVIRONMENT, require_serve

ENGINES_APP = "minisgl-engines-"
"""Beginning of the names of the engines' applications."""
PROXY_ENVIRONMENT = {
    **SERVE_ENVIRONMENT,
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "minisgl_server.ray.proxy_middleware:middlewares",
}
"""Environment variables of Serve's proxies, which have them from the controller."""
POLL_S = 1.0
"""Interval at which the state of the applications is polled."""
DRAIN_SLACK_S = 10.0
"""Time beyond ``--drain-timeout`` that an application has to end."""
HEAD_S = 15.0
"""Longest time that the head of the cluster may not answer."""


class _StoppedError(BaseException):
    """A signal asked the launcher to end. Like KeyboardInterrupt, it is no `Exception`, so handlers of errors do not catch it."""


def serve_on_ray(config: EngineConfig, options: ServerOptions, registry: Registry) -> None:
    """Serve with the replicas of a Ray cluster until SIGTERM, SIGINT or SIGHUP, or until another launch replaces this one."""
    setproctitle.setproctitle("minisgl: launch")
    check_api_workers(options)
    executor = registry.load("executor", "ray")
    num_cpus = config.parallel.size * options.replica_range[1] + options.api_workers + 1  # one spare
    if reasons := executor.unsupported(ExecutorSpec()):
        raise ProviderUnsupportedError("executor", "ray", reasons)
    owns_cluster = executor.connect(num_cpus) and not os.environ.get("RAY_ADDRESS")
    require_serve()  # after `connect`, which sets variables that Ray reads when it is imported
    import ray

    name = f"{ENGINES_APP}{secrets.token_hex(4)}"
    has_head = True
    try:
        _raise_on_signal()
        _deploy(config, options, name, executor.copied_environment())
        has_head = _wait_replaced(name)
        if not has_head:
            raise WorkerDiedError(f"The head of the Ray cluster has not answered for {HEAD_S:g} s.", "head")
        click.echo("Another launch has replaced this one.")
    except _StoppedError:
        click.echo(f"Stopping: running requests have {options.drain_timeout:g} s to finish.")
    finally:
        if has_head:
            _remove(name, options, owns_cluster)
            ray.shutdown()


def _remove(name: str, options: ServerOptions, owns_cluster: bool) -> None:
    """Remove the applications that no other launch needs."""
    from ray import serve

    with suppress(Exception):  # the cluster may be lost
        running = _applications()
        if [each for each in running if each.startswith(ENGINES_APP)] == [name] and API_APP in running:
            _delete(API_APP, options)  # before the engines, which it needs; another launch would need the API
        if name in running:
            _delete(name, options)
    with suppress(Exception):
        if owns_cluster:
            serve.shutdown()


def _deploy(config: EngineConfig, options: ServerOptions, name: str, environment: dict[str, str]) -> None:
    """Start the engines, then the API, then remove the engines of earlier launches."""
    from ray import serve
    from ray.serve.context import _get_global_client

    from minisgl_server.ray import app

    port = options.port
    if not port:
        with listen(options.host, 0) as listener:
            port = listener.getsockname()[1]
    controller = {"runtime_env": {"env_vars": PROXY_ENVIRONMENT}}
    http_options = {"host": options.host, "port": port}
    serve.start(
        proxy_location="EveryNode",
        http_options=http_options,
        controller_options=controller,
        logging_config=app.serve_logs(options),
    )
    http = _get_global_client().http_config  # if Serve runs already, it keeps its own
    if (http.host, http.port) != (options.host, port):
        options, port = replace(options, host=http.host), http.port
        click.echo("Serve runs on this cluster already, and keeps its host and port.")
    hosts = allowed_hosts(options, str(socket.getaddrinfo(options.host, port)[0][4][0]))
    options = replace(options, allowed_hosts=hosts)
    earlier = [each for each in _applications() if each.startswith(ENGINES_APP)]
    logging.getLogger("ray.serve").setLevel(options.log_level.upper())
    try:
        started = name
        handle = serve.run(app.engines(config, options, {}, environment), name=name, route_prefix=None)
        info: EngineInfo = decoder(EngineInfo)(handle.describe.remote().result())
        started = API_APP
        serve.run(app.api(config, options, name, environment), name=API_APP, route_prefix="/")
    except RuntimeError as error:
        # If a replica has failed, Serve's message is a traceback.
        *_, reason = ["no reason is known", *f"{error} {_reasons(started)}".strip().splitlines()]
        reason = re.sub(r"^minisgl[\w.]*Error: ", "", reason)
        raise WorkerDiedError(f"The replicas did not start: {reason}", "replicas") from None
    deadline = time.monotonic() + options.drain_timeout
    while _is_replacing() and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for each in earlier:
        _delete(each, options)
    low, high = options.replica_range
    count = str(low) if low == high else f"{low} to {high}"
    click.echo(
        f"model     {options.served_model_name or info.model} ({info.architecture}, {info.dtype} on {info.device})"
    )
    click.echo(f"replicas  {count} on the Ray cluster, behind the router {options.router}")
    click.echo(f"\nServing at http://{url_host(options.host)}:{port}/v1, by Serve's proxy on each node with replicas")


def _wait_replaced(name: str) -> bool:
    """Wait until the engines have been removed, or the head of the cluster is lost. Return False if it is lost."""
    answered_s, is_over = time.monotonic(), threading.Event()

    def poll() -> None:
        nonlocal answered_s
        while not is_over.wait(POLL_S):
            with suppress(Exception):
                if name not in _applications():
                    is_over.set()
                answered_s = time.monotonic()

    # Calls to a lost head take a minute.
    thread = threading.Thread(target=poll, name="minisgl: head", daemon=True)
    thread.start()
    try:
        while not is_over.wait(POLL_S):
            if time.monotonic() - answered_s > HEAD_S:
                return False
        return True
    finally:
        is_over.set()
        thread.join(POLL_S)


def _applications() -> list[str]:
    """Return the names of the applications that are not being removed."""
    from ray import serve

    return [name for name, each in serve.status().applications.items() if each.status != "DELETING"]


def _delete(name: str, options: ServerOptions) -> None:
    """Remove an application, and wait until its requests have ended."""
    from ray import serve

    serve.delete(name, _blocking=False)
    deadline = time.monotonic() + options.drain_timeout + DRAIN_SLACK_S
    while name in serve.status().applications and time.monotonic() < deadline:
        time.sleep(0.2)


def _reasons(name: str) -> str:
    """Return the messages of an application's deployments that are not healthy."""
    from ray import serve

    application = serve.status().applications.get(name)
    deployments = [] if application is None else application.deployments.values()
    messages = [each.message.strip() for each in deployments if each.status != "HEALTHY"]
    return " ".join(message for message in messages if message)


def _is_replacing() -> bool:
    """Return True while replicas of the API that are not of its newest version finish their requests."""
    from ray import serve

    deployment: Any = serve.status().applications[API_APP].deployments["API"]
    return any(number for state, number in deployment.replica_states.items() if state != "RUNNING")


def _raise_on_signal() -> None:
    """Raise `_StoppedError` at the first of `stop_signals`."""

    def stop(*_: object) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)  # a second signal ends the launcher at once
        raise _StoppedError

    numbers = stop_signals()
    for number in numbers:
        signal.signal(number, stop)
