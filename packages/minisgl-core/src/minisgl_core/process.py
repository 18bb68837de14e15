"""Named child processes, watched: a child that fails is an error in the parent, and nothing outlives the parent.

A pipe joins the parent to each child. The child reports on it that it is ready or why it failed; and when the parent is
gone, killed even, the pipe's end closes and the child ends itself.

SIGINT, SIGTERM and SIGHUP often go to all processes at once: by a terminal, by systemd, by ``kill -- -GROUP``. What ends when
is the parent's decision, so children ignore them, and the parent ends them by `END_SIGNAL`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection, get_context, resource_tracker
from pkgutil import resolve_name
from typing import Any

import msgspec
import setproctitle

from minisgl_core import logs
from minisgl_core.errors import USER_ERRORS, MinisglError, WorkerDiedError, WorkerRefusedError
from minisgl_core.messages import Decoder, Ready, encode

END_SIGNAL = signal.SIGUSR1
"""Asks a child to end."""
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""By children."""
GRACE_S = 3.0
"""From `END_SIGNAL` to SIGKILL."""
_LONGEST_WAIT_S = 3600.0
"""Of a system call: it counts milliseconds in 32 bits."""

Report = Callable[[Ready], None]


class _Failed(msgspec.Struct, tag=True):
    """A child's last word: one exception."""

    kind: str
    text: str
    trace: str
    is_expected: bool
    """A `MinisglError`, whose text is for users and says all."""
    is_users: bool
    """One of `USER_ERRORS`."""


class Supervisor:
    """The children of this process.

    Args:
        directory: removed by the children where the parent was killed and could not (the sockets' one).
        log_level: the least important messages that children log, such as ``info``; None leaves logging alone.
        log_format: see `minisgl_core.logs`.
    """

    def __init__(self, directory: str | None = None, log_level: str | None = None, log_format: str = "text") -> None:
        self._setup = (directory, log_level, log_format)
        self._context = get_context("spawn")
        self._processes: dict[str, Any] = {}
        self._pipes: dict[str, Any] = {}
        self._ending: set[str] = set()
        self._decode = Decoder(Ready | _Failed)
        self.ready: dict[str, Ready] = {}
        """What each child that has started said, by name."""
        atexit.register(self.terminate)

    def start(self, name: str, target: Callable[..., None] | str, *args: Any) -> None:
        """Run ``target(*args, report)`` in a process titled ``minisgl: <name>``; it calls `report` once it has started.

        A target given as ``module:function`` is imported in the child only.
        The child ends at `END_SIGNAL` by `SystemExit`.
        """
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_child, args=(name, theirs, self._setup, target, args), name=name, daemon=True
        )
        # A signal before the child ignores it would end it: the mask goes with it. What multiprocessing starts first has its own.
        resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
        self._processes[name], self._pipes[name] = process, ours

    def pid(self, name: str) -> int:
        """Process id of a child."""
        return int(self._processes[name].pid)

    def is_alive(self, name: str) -> bool:
        """Whether a child still runs."""
        return bool(self._processes[name].is_alive())

    def end(self, name: str) -> None:
        """Ask one child to end, by `END_SIGNAL`; its end is no error from now on."""
        self._ending.add(name)
        _ask_to_end(self._processes[name])

    def wait(
        self, until: Callable[[], bool] = lambda: False, *, timeout_s: float | None = None, wake: Any = None
    ) -> bool:
        """Wait until `until()` holds; it is looked at after each event of a child.

        Args:
            until: the condition.
            timeout_s: longest wait; None or infinity for ever, 0 only looks.
            wake: a file descriptor or pipe that ends the wait when there is something to read.

        Returns:
            Whether the condition holds.

        Raises:
            WorkerDiedError: a child failed or ended that was not asked to; WorkerRefusedError where its user can put that right.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            # Who runs is asked before `until`: who ends after this wakes the wait, and who ended before it, `until` sees.
            exits = [process.sentinel for process in self._processes.values() if process.exitcode is None]
            if until():
                return True
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            watched = [pipe for name, pipe in self._pipes.items() if name not in self._ending]
            longest = _LONGEST_WAIT_S if remaining is None else min(remaining, _LONGEST_WAIT_S)
            events = connection.wait([*watched, *exits, *([] if wake is None else [wake])], longest)
            for name in list(self._pipes):
                self._look_at(name)
            if remaining == 0 or (wake is not None and wake in events):
                return until()

    def wait_ready(self, *names: str, timeout_s: float | None = None, wake: Any = None) -> bool:
        """Wait until these children, or all, have reported that they are ready. See `wait`."""
        wanted = set(names or self._processes)
        return self.wait(lambda: wanted <= self.ready.keys(), timeout_s=timeout_s, wake=wake)

    def terminate(self, grace_s: float = GRACE_S) -> None:
        """End every child: `END_SIGNAL`, and SIGKILL to what still runs `grace_s` later. Fine to call twice."""
        atexit.unregister(self.terminate)
        running = [process for process in self._processes.values() if process.is_alive()]
        for process in running:
            _ask_to_end(process)
        deadline = time.monotonic() + grace_s
        for process in running:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in running:
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes.values():
            pipe.close()
        self._processes.clear()
        self._pipes.clear()

    def _look_at(self, name: str) -> None:
        """Take a child's messages, and raise if it failed or died."""
        pipe, process = self._pipes[name], self._processes[name]
        ended = not process.is_alive()  # looked at first: what it said before it ended is in the pipe by now
        try:
            while pipe.poll():
                message = self._decode(pipe.recv_bytes())
                if isinstance(message, Ready):
                    self.ready[name] = message
                elif name not in self._ending:
                    raise (WorkerRefusedError if message.is_users else WorkerDiedError)(
                        _describe_failure(name, message)
                    )
        except (EOFError, OSError):
            process.join(GRACE_S)
            ended = True
        if ended and name not in self._ending:
            raise WorkerDiedError(f"The process '{name}' {describe_exit(process.exitcode)}.")


def _ask_to_end(process: Any) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.kill(process.pid, END_SIGNAL)


def describe_exit(exitcode: int | None) -> str:
    """How a process ended, in words that follow its name."""
    if exitcode is None:
        return "closed its pipe and hangs"
    if exitcode >= 0:
        return f"ended unexpectedly with exit code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    hint = " (the system does so when memory runs out)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def _describe_failure(name: str, failed: _Failed) -> str:
    """What the user can put right stands first; a bug is told with its type."""
    if failed.is_expected:
        text = f"{failed.text} (in the process '{name}')"
    else:
        hint = "" if failed.trace else " (MINISGL_DEBUG=1 shows the traceback)"
        text = f"The process '{name}' failed: {failed.kind}: {failed.text}{hint}"
    return f"{text}\n{failed.trace}" if failed.trace else text


def _child(
    name: str,
    pipe: Any,
    setup: tuple[str | None, str | None, str],
    target: Callable[..., None] | str,
    args: tuple[Any, ...],
) -> None:
    directory, log_level, log_format = setup
    setproctitle.setproctitle(f"minisgl: {name}")
    if log_level is not None:
        logs.configure(name, log_level, log_format)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    signal.signal(END_SIGNAL, _end)
    threading.Thread(target=_end_with_parent, args=(pipe, directory), daemon=True).start()
    try:
        if isinstance(target, str):
            target = resolve_name(target)
        assert callable(target)
        target(*args, lambda ready: pipe.send_bytes(encode(ready)))
    except Exception as error:
        trace = traceback.format_exc() if os.environ.get("MINISGL_DEBUG") == "1" else ""
        kinds = isinstance(error, MinisglError), isinstance(error, USER_ERRORS)
        pipe.send_bytes(encode(_Failed(type(error).__name__, str(error), trace, *kinds)))
        sys.exit(1)
    finally:
        signal.signal(END_SIGNAL, signal.SIG_DFL)  # nothing is left that an exception could unwind


def _end(*_: object) -> None:
    """`END_SIGNAL`: unwind, and end in any case, as an exception in a destructor goes no further."""
    signal.signal(END_SIGNAL, signal.SIG_IGN)
    last_resort = threading.Timer(GRACE_S / 2, os._exit, (0,))
    last_resort.daemon = True
    last_resort.start()
    sys.exit(0)


def _end_with_parent(pipe: Any, directory: str | None) -> None:
    try:
        pipe.recv_bytes()  # nothing is ever sent: it returns when the parent's end closes
    except (EOFError, OSError):
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
        os._exit(1)
