"""Limits on time and memory of a chat template, which is a program from a checkpoint."""

import contextlib
import ctypes
import math
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import psutil

Result = TypeVar("Result")

MAX_SECONDS = 10.0
"""Time limit. Templates take milliseconds for a thousand messages."""
MAX_GROWTH_BYTES = 512 * 2**20
"""Limit on the growth of the process's resident memory while a template runs."""
_POLL_S = 0.05
"""Time between two checks of the limits."""
_RETRY_S = 1.0
"""Time after which a template that still runs is stopped again, since a destructor may have swallowed the first exception. A
shorter time could interrupt the code that handles the exception."""


class RenderLimitError(Exception):
    """A template was stopped; the message names the limit."""


class _Stop(BaseException):
    """Raised inside a template by the watchdog. It is not an `Exception`, so that no library catches it."""


@dataclass(slots=True, eq=False)
class _Render:
    """A running template."""

    thread: int = field(default_factory=threading.get_ident)
    started_s: float = field(default_factory=time.monotonic)
    first_bytes: int | None = None
    stopped_by: str = ""
    stopped_s: float = -math.inf


class _Watchdog:
    """Watchdog thread that stops templates. It runs only while a template runs.

    An exception can be raised in a Python thread between two bytecode instructions, and a template's loops consist of these.
    A single operation such as ``'x' * 10000000000`` fails by RLIMIT_DATA. On systems without this limit, nothing stops it.
    Nothing stops a single operation that is slow but needs little memory, either, such as a comparison of nested lists.
    """

    def __init__(self) -> None:
        self._lock, self._renders = threading.Lock(), set[_Render]()
        self._is_watching = False
        self._data_limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        """Limits of the process's memory before the templates that run."""

    def begin(self, render: _Render) -> None:
        """Start to watch a render."""
        with self._lock:
            if not self._renders:
                self._limit_memory()
            self._renders.add(render)
            if not self._is_watching:
                self._is_watching = True
                threading.Thread(target=self._watch, name="template watchdog", daemon=True).start()

    def end(self, render: _Render) -> None:
        """Stop watching a render of this thread, and swallow an exception that was not raised yet.

        It is replaced and raised, not cancelled. In CPython 3.11, a cancelled exception stays signalled in the process, and the
        next function that a debugger or a profiler traces never begins.
        """
        with self._lock:
            if self._renders == {render}:
                resource.setrlimit(resource.RLIMIT_DATA, self._data_limits)
            self._renders.discard(render)
            if render.stopped_by:
                with contextlib.suppress(_Stop):  # the template may have ended before the exception was raised
                    _raise_in(render.thread)

    def _limit_memory(self) -> None:
        """Let the process allocate no more than `MAX_GROWTH_BYTES` while templates run."""
        self._data_limits = soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        num_bytes = getattr(psutil.Process().memory_info(), "data", None)  # Linux has it
        if num_bytes is not None and (soft == resource.RLIM_INFINITY or num_bytes + MAX_GROWTH_BYTES < soft):
            resource.setrlimit(resource.RLIMIT_DATA, (num_bytes + MAX_GROWTH_BYTES, hard))

    def _watch(self) -> None:
        while True:
            time.sleep(_POLL_S)
            with self._lock:
                if not self._renders:
                    self._is_watching = False
                    return
                try:
                    num_bytes = psutil.Process().memory_info().rss
                except MemoryError:  # the template fails by the same limit
                    continue
                for render in self._renders:
                    self._check(render, num_bytes)

    def _check(self, render: _Render, num_bytes: int) -> None:
        if render.first_bytes is None:
            render.first_bytes = num_bytes
        now_s = time.monotonic()
        if now_s - render.stopped_s < _RETRY_S:
            return
        if now_s - render.started_s > MAX_SECONDS:
            render.stopped_by = f"the template ran for more than {MAX_SECONDS:g} s"
        elif num_bytes - render.first_bytes > MAX_GROWTH_BYTES:
            render.stopped_by = _memory_message()
        if render.stopped_by:
            render.stopped_s = now_s
            _raise_in(render.thread)


_watchdog = _Watchdog()


def run_limited(function: Callable[[], Result]) -> Result:
    """Call a function that renders a template.

    Raises:
        RenderLimitError: it took longer than `MAX_SECONDS` or more memory than `MAX_GROWTH_BYTES`.
    """
    render = _Render()
    try:
        _watchdog.begin(render)
        try:
            return function()
        finally:
            _watchdog.end(render)
    except _Stop:
        _watchdog.end(render)  # again, as the exception may have interrupted the first call
        raise RenderLimitError(render.stopped_by) from None
    except MemoryError:
        raise RenderLimitError(_memory_message()) from None


def _memory_message() -> str:
    return f"the template took more than {MAX_GROWTH_BYTES // 2**20} MiB of memory"


def _raise_in(thread: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Stop))
