"""Checks of grammars in child processes, before the engine's process compiles them.

Some short texts take minutes or gigabytes to compile. A thread cannot be stopped or limited in memory, but a process can. So a
child process first calls `GrammarBackend.check`, which does the expensive work of a compilation: a trial. The child ends when its
pipe closes, however the engine's process ends.

A quick trial has a tenth of the CPU time, and a process of its own. Nearly all grammars pass it, so that they do not wait for
the trials of those that need more.
"""

import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection, Pipe
from threading import Lock

import msgspec

from minisgl_core.contracts.structured_outputs import GrammarSource
from minisgl_core.errors import InvalidValueError, MinisglError, PluginError, Summary
from minisgl_core.protocol.messages import decoder, encode
from minisgl_core.utils.exit_status import describe_exit

CPU_LIMIT_S = 0.5
"""CPU time of one trial, for a grammar and all of its parts."""
QUICK_LIMIT_S = 0.05
"""CPU time of a quick trial. Most grammars take a few milliseconds."""
MEMORY_LIMIT_BYTES = 128 * 1024**2
"""Maximum memory of one trial."""
_WALL_LIMIT_S = 30.0
"""Wall-clock time of one trial. It ends a child process that gets no CPU time."""
_START_LIMIT_S = 120.0
"""Longest start of the child process, which imports the provider."""


class QuickLimitError(Exception):
    """A grammar needs more CPU time than a quick trial has."""


class Trial(msgspec.Struct, tag=True):
    """A grammar to try, with a number that its `Verdict` repeats."""

    number: int
    source: GrammarSource


class Verdict(msgspec.Struct, tag=True):
    """Result of a trial. The child process also sends one when it has started, which is empty if the start succeeded.

    Attributes:
        number: number of the trial; 0 if `exit_status` is set.
        num_bytes: memory that the trial took.
        name, allowed, remedy: those of the `InvalidValueError` that the trial raised; empty if it raised none.
        plugin_error: the reason why the provider cannot be loaded.
        failure: any other exception of the provider.
        exit_status: exit status of the process that runs trials, if it ended; 0 otherwise.
    """

    number: int = 0
    num_bytes: int = 0
    name: str = ""
    allowed: str = ""
    remedy: str = ""
    plugin_error: str = ""
    failure: str = ""
    exit_status: int = 0


class GrammarChecker:
    """Checker of grammars, which runs trials in child processes. Several threads may use it."""

    def __init__(self, provider: str) -> None:
        self._quick, self._thorough = TrialProcess(provider, QUICK_LIMIT_S), TrialProcess(provider, CPU_LIMIT_S)

    def check(self, source: GrammarSource, is_quick: bool = False) -> int:
        """Check the parts of a grammar and its text in a child process.

        Returns:
            Memory that the check took, in bytes.

        Raises:
            QuickLimitError: a quick trial has too little CPU time.
            InvalidValueError: a text is not valid for its kind, or exceeds a limit.
            MinisglError: the provider cannot be loaded, or the process does not start.
            RuntimeError: the provider failed in another way.
        """
        verdict = (self._quick if is_quick else self._thorough).run(source)
        if is_quick and verdict.exit_status == -signal.SIGPROF:
            raise QuickLimitError
        if verdict.exit_status:
            given, remedy = source.text, "Ask for a simpler structure."
            if source.kind == "tool_calls":  # the text is not the user's
                given, remedy = Summary(f"{len(source.parts)} tools"), "Send fewer or simpler tools."
            raise InvalidValueError(source.name, given, _limit(verdict.exit_status), remedy)
        if verdict.allowed:
            text = dict(source.parts).get(verdict.name, source.text)
            raise InvalidValueError(verdict.name, text, verdict.allowed, verdict.remedy)
        if verdict.failure:
            raise RuntimeError(f"the grammar backend failed in its own process: {verdict.failure}")
        return verdict.num_bytes

    def close(self) -> None:
        """End the processes. A trial that is running then fails."""
        for each in (self._quick, self._thorough):
            each.close()


class TrialProcess:
    """Child process that runs trials one by one in a fork of itself. A trial starts it, again if it was killed."""

    def __init__(self, provider: str, cpu_limit_s: float) -> None:
        self._provider, self._cpu_limit_s = provider, cpu_limit_s
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._decode = decoder(Verdict)
        self._number = 0
        """Number of the newest trial."""

    def run(self, source: GrammarSource) -> Verdict:
        """Return the result of a trial. If the child process does not start, this raises MinisglError."""
        with self._lock:
            try:
                return self._run(source)
            except (EOFError, OSError):
                return Verdict(exit_status=self._end())

    def close(self) -> None:
        """End the process."""
        if (process := self._process) is not None:  # without the lock, which a running trial holds
            process.kill()
        with self._lock:
            self._end()

    def _run(self, source: GrammarSource) -> Verdict:
        if self._pipe is None:
            self._start()
        assert self._pipe is not None
        while self._pipe.poll(0):  # the exit status of a fork that was killed between two trials
            self._pipe.recv_bytes()
        self._number += 1
        self._pipe.send_bytes(encode(Trial(self._number, source)))
        deadline = time.monotonic() + _WALL_LIMIT_S
        while self._pipe.poll(max(0.0, deadline - time.monotonic())):
            verdict: Verdict = self._decode(self._pipe.recv_bytes())
            if verdict.number == self._number or verdict.exit_status:
                return verdict
        raise EOFError

    def _start(self) -> None:
        ours, theirs = Pipe()
        module = "minisgl_core.scheduler.grammar_checker_process"
        command = [sys.executable, "-P", "-m", module, str(theirs.fileno()), self._provider, str(self._cpu_limit_s)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        theirs.close()
        self._pipe = ours
        try:
            if not ours.poll(_START_LIMIT_S):
                raise EOFError
            verdict = self._decode(ours.recv_bytes())
        except (EOFError, OSError):
            self._end()
            raise MinisglError("the process that checks grammars does not start; see standard error") from None
        if verdict.plugin_error:
            self._end()
            raise PluginError(verdict.plugin_error)

    def _end(self) -> int:
        """End the process, and return its exit status. If it has to be killed, return the status of an exceeded CPU limit."""
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None
        if pipe is not None:
            pipe.close()
        if process is None:
            return -signal.SIGKILL
        try:
            return process.wait(1) or -signal.SIGKILL  # 0 would mean that the trial succeeded
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return -signal.SIGPROF


def _limit(exit_status: int) -> str:
    """Return the limit that a trial exceeded, or how it ended, as the ``allowed`` of an error."""
    if exit_status == -signal.SIGPROF:
        return f"compiled within {CPU_LIMIT_S:g} s of CPU time"
    if exit_status in (-signal.SIGABRT, -signal.SIGSEGV):  # SIGSEGV at the end of the stack
        return f"compiled within {MEMORY_LIMIT_BYTES // 1024**2} MiB of memory"
    return f"compiled without an error of the provider, whose process {describe_exit(exit_status)}"
