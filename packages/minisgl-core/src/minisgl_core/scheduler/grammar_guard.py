"""Trial of grammars in a process of its own, before the engine's process compiles them.

Some short texts take minutes or gigabytes to compile. A thread cannot be stopped or bounded in memory; a process can.
So a text is compiled there first. It ends when its pipe closes, which happens however the engine's process ends.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from threading import Lock

import msgspec

from minisgl_core.contracts.grammar import GrammarKind
from minisgl_core.errors import InvalidValueError, MinisglError, PluginError
from minisgl_core.messages import Decoder, encode
from minisgl_core.process import describe_exit

CPU_LIMIT_S = 0.5
"""Processor time of one trial."""
MEMORY_LIMIT_BYTES = 128 * 1024**2
"""Memory that one trial may take."""
_WALL_LIMIT_S = 30.0
"""A process that gets no processor for so long is ended."""
_START_LIMIT_S = 120.0


class Trial(msgspec.Struct, tag=True):
    """A text to try; see `minisgl_core.contracts.grammar.Grammar.check`."""

    kind: GrammarKind
    text: str
    name: str


class Verdict(msgspec.Struct, tag=True):
    """The result of a trial, or of the start where it says nothing.

    Attributes:
        num_bytes: memory that it took.
        allowed, remedy: of the `InvalidValueError` that it ended in; empty for none.
        plugin_error: why the provider cannot be loaded.
        failure: any other exception.
    """

    num_bytes: int = 0
    allowed: str = ""
    remedy: str = ""
    plugin_error: str = ""
    failure: str = ""


class GrammarGuard:
    """The process, which starts with the first trial and again after one that ended it. For several threads.

    Args:
        provider: name of the grammar provider.
    """

    def __init__(self, provider: str) -> None:
        self._provider = provider
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._decode = Decoder(Verdict)

    def check(self, kind: GrammarKind, text: str, name: str) -> int:
        """Compile a text there.

        Returns:
            Memory that it took, in bytes.

        Raises:
            InvalidValueError: the text is not valid for its kind, or exceeds a limit.
            MinisglError: the provider cannot be loaded, or the process does not start.
            RuntimeError: the provider failed otherwise.
        """
        with self._lock:
            try:
                verdict = self._try(Trial(kind, text, name))
            except (EOFError, OSError):
                allowed = self._end()
                raise InvalidValueError(name, text, allowed, "Ask for a simpler structure.") from None
        if verdict.allowed:
            raise InvalidValueError(name, text, verdict.allowed, verdict.remedy)
        if verdict.failure:
            raise RuntimeError(f"the grammar provider failed in its own process: {verdict.failure}")
        return verdict.num_bytes

    def close(self) -> None:
        """End the process. A trial that runs ends as one that exceeds a limit."""
        with suppress(AttributeError):
            self._process.kill()  # type: ignore[union-attr]  # a trial may end it at the same time
        with self._lock:
            self._end()

    def _try(self, trial: Trial) -> Verdict:
        if self._pipe is None:
            self._start()
        assert self._pipe is not None
        self._pipe.send_bytes(encode(trial))
        if not self._pipe.poll(_WALL_LIMIT_S):
            raise EOFError
        verdict = self._decode(self._pipe.recv_bytes())
        assert isinstance(verdict, Verdict)
        return verdict

    def _start(self) -> None:
        ours, theirs = Pipe()
        module = "minisgl_core.scheduler.grammar_process"
        command = [sys.executable, "-P", "-m", module, str(theirs.fileno()), self._provider]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        theirs.close()
        self._pipe = ours
        try:
            if not ours.poll(_START_LIMIT_S):
                raise EOFError
            verdict = self._decode(ours.recv_bytes())
        except (EOFError, OSError):
            self._end()
            raise MinisglError("the process that checks grammars does not start; standard error says more") from None
        if verdict.plugin_error:
            self._end()
            raise PluginError(verdict.plugin_error)

    def _end(self) -> str:
        """End the process; returns the limit that it had exceeded, if that is why."""
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None
        if pipe is not None:
            pipe.close()
        if process is None:
            return "checked before the engine stops"
        try:
            status = process.wait(1)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        if status in (-signal.SIGPROF, -signal.SIGKILL):
            return f"compiled within {CPU_LIMIT_S:g} s of processor time"
        if status in (-signal.SIGABRT, -signal.SIGSEGV):
            return f"compiled within {MEMORY_LIMIT_BYTES // 1024**2} MiB of memory"
        return f"compiled without an error of the provider, whose process {describe_exit(status)}"
