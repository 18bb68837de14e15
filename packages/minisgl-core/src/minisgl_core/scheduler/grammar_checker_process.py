"""Main function of a process that checks grammars; see `minisgl_core.scheduler.grammar_checker`.

It imports the provider and nothing of the engine, so that it starts fast and needs little memory.
"""

import ctypes
import os
import resource
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import setproctitle

from minisgl_core.contracts.grammar import GrammarBackend
from minisgl_core.contracts.structured_outputs import GrammarSource
from minisgl_core.errors import InvalidValueError, MinisglError
from minisgl_core.plugins.registry import Registry
from minisgl_core.protocol.messages import decoder, encode
from minisgl_core.scheduler.grammar_checker import MEMORY_LIMIT_BYTES, Trial, Verdict

_STACK_BYTES = 1024**2
"""Stack size, smaller than that of the engine's threads: a text that nests too deeply ends this process, not the engine."""
_PR_SET_PDEATHSIG = 1
"""Constant of Linux: a process gets a signal when its parent ends."""
_NICENESS = 10
"""Increment of the niceness, so that trials do not slow the engine down."""


def main(fd: int, provider: str, cpu_limit_s: float) -> None:
    """Run trials from the pipe until its other end closes.

    Trials run in a forked process. If one of them ends it, the next trials run in another, which starts within milliseconds, as
    the provider is imported already.
    """
    setproctitle.setproctitle("minisgl: grammar check")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the engine's process handles these signals
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with suppress(OSError):
        os.nice(_NICENESS)
    pipe = Connection(fd)
    try:
        backend: type[GrammarBackend] = Registry.from_environment().load("grammar", provider)
    except MinisglError as error:
        pipe.send_bytes(encode(Verdict(plugin_error=str(error))))
        return
    pipe.send_bytes(encode(Verdict()))
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)  # hide messages about failed allocations, which the exit status reports
    with suppress(BrokenPipeError):
        while status := _run_trials(pipe, backend, cpu_limit_s):
            pipe.send_bytes(encode(Verdict(exit_status=status)))


def _run_trials(pipe: Connection, backend: type[GrammarBackend], cpu_limit_s: float) -> int:
    """Run trials in a forked process. Return its exit status, which is 0 if the other end of the pipe closed."""
    child = os.fork()
    if child == 0:
        try:
            with suppress(AttributeError):  # without prctl, a fork whose parent was killed ends only after its trial
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            threading.stack_size(_STACK_BYTES)
            worker = threading.Thread(target=_serve, args=(pipe, backend, cpu_limit_s))
            worker.start()
            worker.join()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _serve(pipe: Connection, backend: type[GrammarBackend], cpu_limit_s: float) -> None:
    # What the provider allocates at its first call does not count as memory of a trial.
    with suppress(Exception):  # each trial then fails, too, and reports the error
        backend.check("json_object", "", "")
    _limit_memory()
    decode = decoder(Trial)
    while True:
        try:
            trial: Trial = decode(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        verdict = _verdict(backend, trial.source, cpu_limit_s)
        verdict.number = trial.number
        pipe.send_bytes(encode(verdict))


def _verdict(backend: type[GrammarBackend], source: GrammarSource, cpu_limit_s: float) -> Verdict:
    before = _reset_peak()
    signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)  # SIGPROF ends the process at the limit
    try:
        for name, schema in source.parts:
            backend.check("json_schema", schema, name)
        backend.check(source.kind, source.text, source.name)
    except InvalidValueError as error:
        return Verdict(name=error.name, allowed=error.allowed, remedy=error.remedy)
    except MemoryError:
        os.abort()  # as libraries do when an allocation fails
    except Exception as error:
        return Verdict(failure=f"{type(error).__name__}: {error}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return Verdict(num_bytes=max(0, _memory("VmHWM") - before))


def _limit_memory() -> None:
    used = _memory("VmData")
    if used:
        resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_LIMIT_BYTES,) * 2)


def _reset_peak() -> int:
    """Give free memory back to the system, and reset the peak counter. Return the resident memory in bytes."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(field: str) -> int:
    """Return a field of ``/proc/self/status`` in bytes; 0 on systems other than Linux."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
