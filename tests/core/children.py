"""Functions for the supervisor's tests. Child processes import them by name."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minisgl_core.errors import InvalidValueError, MinisglError
from minisgl_core.plugins.hooks import Hooks
from minisgl_core.plugins.registry import Registry
from minisgl_core.protocol.messages import Ready
from minisgl_core.runtime.supervisor import END_SIGNAL, Supervisor


def end_frozen(report: Callable[[Ready], None]) -> None:
    report(Ready(process="frozen"))
    os._exit(17 if gc.get_freeze_count() > 1000 else 18)


def serve(name: str, report: Callable[[Ready], None]) -> None:
    report(Ready(process=name))
    time.sleep(600)


def log_and_serve(report: Callable[[Ready], None]) -> None:
    logging.info("heard")
    logging.debug("not heard")
    report(Ready(process="talker"))
    time.sleep(600)


def serve_deaf(report: Callable[[Ready], None]) -> None:
    signal.signal(END_SIGNAL, signal.SIG_IGN)
    report(Ready(process="deaf"))
    time.sleep(600)


def hang(*_: Any) -> None:
    time.sleep(600)


def load_hooks(report: Callable[[Ready], None]) -> None:
    Hooks(Registry.from_environment())
    report(Ready(process="loader"))
    time.sleep(600)


def fail_by_user(report: Callable[[Ready], None]) -> None:
    raise InvalidValueError("--attn", "nope", "one of torch")


def fail_by_bug(report: Callable[[Ready], None]) -> None:
    raise KeyError("oops")


def fail_by_text(text: str, report: Callable[[Ready], None]) -> None:
    raise MinisglError(text)


def end_with(code: int, report: Callable[[Ready], None]) -> None:
    report(Ready(process="short"))
    time.sleep(0.2)
    os._exit(code)


def never_ready(report: Callable[[Ready], None]) -> None:
    time.sleep(600)


def die_after_joining(config: Any, places: Any, rank: int, endpoints: Any, report: Callable[[Ready], None]) -> None:
    """Kill this rank after it has joined the process group."""
    from minisgl_core.engine import build
    from minisgl_core.runtime import worker

    build.load_weights = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    worker.run_worker(config, places, rank, endpoints, report)


def main(pid_file: str, directory: str) -> None:
    """Run a supervisor with two children until a test kills this process."""
    supervisor = Supervisor(directory)
    for name in ("one", "two"):
        supervisor.start(name, serve, name)
    supervisor.wait_ready()
    Path(pid_file).write_text(" ".join(str(supervisor.pid(name)) for name in ("one", "two")))
    supervisor.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
