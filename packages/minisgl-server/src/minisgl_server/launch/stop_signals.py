"""Signals that stop the server."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType
from typing import Self


def stop_signals() -> list[signal.Signals]:
    """Return SIGTERM, SIGINT, and SIGHUP unless it is ignored, as under nohup."""
    is_hup_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if is_hup_ignored else [signal.SIGHUP])]


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Set the handler of `stop_signals` meanwhile."""
    before = {number: signal.signal(number, handler) for number in stop_signals()}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def exit_on_signal() -> AbstractContextManager[None]:
    """Let `stop_signals` end the process at once with status 0, while there is nothing to stop yet.

    Without a handler, process 1 of a container would ignore them, for example while it downloads a model.
    """
    return _handled_by(lambda number, frame: os._exit(0))


class StopSignals:
    """Collects the signals of `stop_signals` in a pipe that can be waited for, instead of raising exceptions.

    `count` is the number of signals so far, and `last` is the last one.
    """

    def __init__(self) -> None:
        self.count = self.last = 0
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._handlers = ExitStack()

    def fileno(self) -> int:
        """Return a file descriptor that is readable once a signal has arrived."""
        return self._reader

    def clear(self) -> None:
        """Forget one signal, so that `fileno` is readable at the next."""
        os.read(self._reader, 1)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count, self.last = self.count + 1, number
        os.write(self._writer, b"x")

    def __enter__(self) -> Self:
        self._handlers.enter_context(_handled_by(self._handle))
        return self

    def __exit__(self, *_: object) -> None:
        self._handlers.close()
        os.close(self._reader)
        os.close(self._writer)
