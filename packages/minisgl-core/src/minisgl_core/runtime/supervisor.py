"""Supervision of named child processes: a child that fails raises an error in the parent, and no child outlives the parent.

A pipe connects the parent with each child. The child reports there that it is ready, or why it failed. When the parent ends,
even by SIGKILL, the pipe closes and the child ends itself.

A terminal, systemd and ``kill -- -GROUP`` send SIGINT, SIGTERM and SIGHUP to all processes at once. Children ignore these
signals, because the parent decides when each child ends. It ends them with `END_SIGNAL`.
"""

import atexit
import contextlib
import gc
import logging
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

from minisgl_core.errors import USER_ERRORS, MinisglError, WorkerDiedError, WorkerRefusedError
from minisgl_core.protocol.messages import Ready, decoder, encode
from minisgl_core.utils import logs
from minisgl_core.utils.exit_status import EndRequest, describe_exit

logger = logging.getLogger(__name__)

END_SIGNAL = signal.SIGUSR1
"""Signal that asks a child to end."""
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that children ignore."""
GRACE_S = 3.0
"""Time from `END_SIGNAL` to SIGKILL."""
_KILLED_S = 1.0
"""Longest wait, after a child failed, for the exit status of a child that a signal killed. The killed child is reported, since
others fail because of it."""
_MAX_WAIT_S = 3600.0
"""Longest timeout of one system call, which counts milliseconds in 32 bits."""

Report = Callable[[Ready], None]
"""Function that a child calls once it has started."""


class _Failed(msgspec.Struct, tag=True):
    """Last message of a child: the exception that ended it."""

    kind: str
    text: str
    trace: str
    """The traceback; empty for a `MinisglError`, whose message is written for users, unless MINISGL_DEBUG is 1."""
    is_minisgl_error: bool
    is_user_error: bool
    """True for one of `USER_ERRORS`."""


class Supervisor:
    """Supervisor of child processes.

    Args:
        directory: directory of the sockets, which the children remove if the parent was killed and could not.
        log_level: lowest level that children log, such as ``info``; None does not configure their logging.
        log_format: see `minisgl_core.utils.logs`.
    """

    def __init__(self, directory: str | None = None, log_level: str | None = None, log_format: str = "text") -> None:
        self.log_level, self.log_format, self._directory = log_level, log_format, directory
        self._context = get_context("spawn")
        self._processes: dict[str, Any] = {}
        self._pipes: dict[str, Any] = {}
        self._ending: set[str] = set()
        self._kill_reasons: dict[str, str] = {}
        self._decode = decoder(Ready | _Failed)
        self.ready: dict[str, Ready] = {}
        """Ready messages of the children that have started, by name."""
        atexit.register(self.terminate)

    def start(self, name: str, target: Callable[..., None] | str, *args: Any) -> None:
        """Run ``target(*args, report)`` in a process titled ``minisgl: <name>``. It calls `report` once it has started.

        A target of the form ``module:function`` is imported in the child only. `END_SIGNAL` raises `EndRequest` in the child.
        """
        ours, theirs = self._context.Pipe()
        child_args = name, theirs, self._directory, self.log_level, self.log_format, target, args
        process = self._context.Process(target=_child, args=child_args, name=name, daemon=True)
        # The child inherits a signal mask, as a signal before it sets its handlers would end it. Multiprocessing's resource
        # tracker must not inherit the mask, so it is started first.
        resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
        self._processes[name], self._pipes[name] = process, ours

    def pid(self, name: str) -> int:
        return int(self._processes[name].pid)

    def is_alive(self, name: str) -> bool:
        return bool(self._processes[name].is_alive())

    def end(self, name: str) -> None:
        """Ask one child to end, with `END_SIGNAL`. `wait` does not report its exit then; see `check_ended`."""
        self._ending.add(name)
        _ask_to_end(self._processes[name])

    def check_ended(self) -> None:
        """Raise WorkerDiedError if a child that was asked to end has failed, or another signal has killed it."""
        for name in sorted(self._ending):
            if self._processes[name].exitcode not in (None, 0, -END_SIGNAL):
                raise WorkerDiedError(f"The process '{name}' {describe_exit(self._processes[name].exitcode)}.", name)

    def kill(self, name: str, reason: str) -> None:
        """Kill a child. It is reported as one that died, with `reason`, which follows its name."""
        self._kill_reasons[name] = reason
        self._processes[name].kill()

    def discard(self, *names: str) -> None:
        """Kill children and forget them, so that their names can be used again."""
        for name in names:
            self._processes[name].kill()
        for name in names:
            self._processes.pop(name).join()
            self._pipes.pop(name).close()
            self.ready.pop(name, None)
            self._ending.discard(name)
            self._kill_reasons.pop(name, None)

    def wait(
        self, until: Callable[[], bool] = lambda: False, *, timeout_s: float | None = None, wake: Any = None
    ) -> bool:
        """Wait until `until()` is true. It is called after each event of a child.

        Args:
            until: the condition.
            timeout_s: longest wait; None or infinity waits forever, 0 does not wait.
            wake: file descriptor or pipe that ends the wait when it is readable.

        Returns:
            True if the condition holds.

        Raises:
            WorkerDiedError: a child failed, or ended without being asked to.
            WorkerRefusedError: a child failed with an error that the user can correct.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            # List the running children before calling `until`, so that a child that ends during the call ends the wait at once.
            exits = [process.sentinel for process in self._processes.values() if process.exitcode is None]
            if until():
                return True
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            watched = [pipe for name, pipe in self._pipes.items() if name not in self._ending]
            wait_s = _MAX_WAIT_S if remaining is None else min(remaining, _MAX_WAIT_S)
            events = connection.wait([*watched, *exits, *([] if wake is None else [wake])], wait_s)
            self._check_children()
            if remaining == 0 or (wake is not None and wake in events):
                return until()

    def wait_ready(self, *names: str, timeout_s: float | None = None, wake: Any = None) -> bool:
        """Wait until these children, or all children, have reported that they are ready. See `wait`."""
        wanted = set(names or self._processes)
        return self.wait(lambda: wanted <= self.ready.keys(), timeout_s=timeout_s, wake=wake)

    def terminate(self, grace_s: float = GRACE_S) -> None:
        """End all children with `END_SIGNAL`, and with SIGKILL after `grace_s`. May be called twice."""
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

    def _check_children(self) -> None:
        """Read the messages of all children. Raise an error if one failed or died; a killed child is reported first."""
        try:
            for name in self._pipes:
                self._check_child(name)
        except WorkerDiedError as error:
            # Children fail because they lose their connection to a killed one, whose end may become visible only after that.
            may_be_late = len(self._processes) > 1 and not isinstance(error, WorkerRefusedError)
            deadline = time.monotonic() + (_KILLED_S if may_be_late else 0.0)
            while not (killed := self._killed()) and time.monotonic() < deadline:
                time.sleep(0.01)
            for name in killed:
                self._check_child(name)
            raise

    def _killed(self) -> list[str]:
        """Return the names of the children that a signal ended, without those that were asked to end."""
        return [name for name, each in self._processes.items() if name not in self._ending and (each.exitcode or 0) < 0]

    def _check_child(self, name: str) -> None:
        """Read a child's messages. Raise an error if it failed or died."""
        pipe, process = self._pipes[name], self._processes[name]
        ended = not process.is_alive()  # checked first, so that all messages of an ended child are in the pipe by now
        try:
            while pipe.poll():
                message = self._decode(pipe.recv_bytes())
                if isinstance(message, Ready):
                    self.ready[name] = message
                elif name not in self._ending:
                    if message.trace:
                        logger.error("The process '%s' failed:\n%s", name, message.trace.rstrip())
                    kind = WorkerRefusedError if message.is_user_error else WorkerDiedError
                    raise kind(_describe_failure(name, message), name)
        except (EOFError, OSError):
            process.join(GRACE_S)
            ended = True
        if ended and name not in self._ending:
            reason = self._kill_reasons.get(name) or describe_exit(process.exitcode)
            raise WorkerDiedError(f"The process '{name}' {reason}.", name)


def _ask_to_end(process: Any) -> None:
    with contextlib.suppress(ProcessLookupError):  # the child has ended
        os.kill(process.pid, END_SIGNAL)


def _describe_failure(name: str, failed: _Failed) -> str:
    """Return a message about a failed child. It begins with the text of an error for users, else with the child's name."""
    if not failed.is_minisgl_error:
        return f"The process '{name}' failed: {failed.kind}: {failed.text}"
    # The message of a rank on another host names the process already.
    return failed.text if f"'{name}'" in failed.text else f"{failed.text} (in the process '{name}')"


def _child(
    name: str,
    pipe: Any,
    directory: str | None,
    log_level: str | None,
    log_format: str,
    target: Callable[..., None] | str,
    args: tuple[Any, ...],
) -> None:
    """Run a child: set up logging and signals, call the target, and report an exception that ends it."""
    setproctitle.setproctitle(f"minisgl: {name}")
    if log_level is not None:
        logs.configure(name, log_level, log_format)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    signal.signal(END_SIGNAL, _end)
    threading.Thread(target=_end_with_parent, args=(pipe, directory), daemon=True).start()

    def report(ready: Ready) -> None:
        gc.freeze()  # a full collection of all modules would take over a tenth of a second, in which no request proceeds
        pipe.send_bytes(encode(ready))

    try:
        if isinstance(target, str):
            target = resolve_name(target)
        assert callable(target)
        target(*args, report)
    except Exception as error:
        kinds = isinstance(error, MinisglError), isinstance(error, USER_ERRORS)
        trace = "" if kinds[0] and os.environ.get("MINISGL_DEBUG") != "1" else traceback.format_exc()
        # Paths that are not UTF-8 and strings of a config.json may have lone surrogates, which cannot be encoded.
        text, trace = (each.encode(errors="backslashreplace").decode() for each in (str(error), trace))
        pipe.send_bytes(encode(_Failed(type(error).__name__, text, trace, *kinds)))
        sys.exit(1)
    finally:
        signal.signal(END_SIGNAL, signal.SIG_DFL)  # no cleanup is left that an exception would run


def _end(*_: object) -> None:
    """Handle `END_SIGNAL`: raise `EndRequest`, and end in any case, since an exception in a destructor is swallowed."""
    signal.signal(END_SIGNAL, signal.SIG_IGN)
    last_resort = threading.Timer(GRACE_S / 2, os._exit, (0,))
    last_resort.daemon = True
    last_resort.start()
    raise EndRequest(0)


def _end_with_parent(pipe: Any, directory: str | None) -> None:
    """Wait until the parent ends, then remove the directory of the sockets and end this process."""
    try:
        pipe.recv_bytes()  # the parent sends nothing, so this returns when its end of the pipe closes
    except (EOFError, OSError):
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
        os._exit(1)
