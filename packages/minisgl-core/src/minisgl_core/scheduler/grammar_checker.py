"""Trial compilation of grammars in a child process, before the engine's process compiles them.

Some short texts take minutes or gigabytes to compile. A thread cannot be stopped or limited in memory, but a process can,
so each text is compiled in the child process first. The child ends when its pipe closes, however the engine's process ends.
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
from minisgl_core.protocol.messages import Decoder, encode
from minisgl_core.utils.exit_status import describe_exit

CPU_LIMIT_S = 0.5
"""CPU time of one trial."""
MEMORY_LIMIT_BYTES = 128 * 1024**2
"""Most memory of one trial."""
_WALL_LIMIT_S = 30.0
"""Wall-clock time of one trial. It ends a child process that gets no CPU time."""
_START_LIMIT_S = 120.0
"""Longest start of the child process, which imports the provider."""


class Trial(msgspec.Struct, tag=True):
    """A text to try; see `minisgl_core.contracts.grammar.GrammarBackend.check`."""

    kind: GrammarKind
    text: str
    name: str


class Verdict(msgspec.Struct, tag=True):
    """Result of a trial, or of the start of the child process if all fields are empty.

    Attributes:
        num_bytes: memory that the trial took.
        allowed, remedy: those of the `InvalidValueError` that the trial raised; empty if it raised none.
        plugin_error: the reason why the provider cannot be loaded.
        failure: any other exception of the provider.
    """

    num_bytes: int = 0
    allowed: str = ""
    remedy: str = ""
    plugin_error: str = ""
    failure: str = ""


class GrammarChecker:
    """Checker of grammars, which compiles them on trial in a child process. Several threads may use it.

    The process starts with the first trial, and again after a trial that ended it.

    Args:
        provider: name of the grammar backend.
    """

    def __init__(self, provider: str) -> None:
        self._provider = provider
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._decode = Decoder(Verdict)

    def check(self, kind: GrammarKind, text: str, name: str) -> int:
        """Compile a text in the child process.

        Returns:
            Memory that the compilation took, in bytes.

        Raises:
            InvalidValueError: the text is not valid for its kind, or exceeds a limit.
            MinisglError: the provider cannot be loaded, or the process does not start.
            RuntimeError: the provider failed in another way.
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
            raise RuntimeError(f"the grammar backend failed in its own process: {verdict.failure}")
        return verdict.num_bytes

    def close(self) -> None:
        """End the process. A trial that is running then ends as if it had exceeded a limit."""
        with suppress(AttributeError):
            self._process.kill()  # type: ignore[union-attr]  # a trial may end it concurrently
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
        module = "minisgl_core.scheduler.grammar_checker_process"
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
            raise MinisglError(
                "the process that checks grammars does not start; see its messages on standard error"
            ) from None
        if verdict.plugin_error:
            self._end()
            raise PluginError(verdict.plugin_error)

    def _end(self) -> str:
        """End the process. Return the limit that it exceeded, or how it ended, as the ``allowed`` of an error."""
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
            process.wait()
            status = -signal.SIGPROF
        if status == -signal.SIGPROF:
            return f"compiled within {CPU_LIMIT_S:g} s of processor time"
        if status in (-signal.SIGABRT, -signal.SIGSEGV):
            return f"compiled within {MEMORY_LIMIT_BYTES // 1024**2} MiB of memory"
        return f"compiled without an error of the provider, whose process {describe_exit(status)}"
