"""The process that compiles kernels in the background; it ends with its parent, and so do its compilers."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from minisgl_core.config.options import EngineConfig
from minisgl_core.engine.kernel_compiler import start_kernel_compiler, stop_kernel_compiler

SLOW = """
import subprocess, sys
from minisgl_core.engine import kernel_compiler
kernel_compiler.compile_kernels = lambda config: subprocess.run(["sleep", "600"])
sys.argv = ["kernel_compiler"]
kernel_compiler.main()
"""


def test_nothing_is_compiled_if_preferred_kernels_are_built() -> None:
    process = start_kernel_compiler(EngineConfig.from_flat(attn="torch"), "warning", "text", background=True)
    assert process.wait(timeout=120) == 0
    process.communicate()


def test_errors_are_logged_without_a_traceback(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = EngineConfig.from_flat(model=str(tmp_path / "absent"))
    process = start_kernel_compiler(config, "warning", "text", background=False)
    assert process.wait(timeout=120) == 1
    process.communicate()
    text = capfd.readouterr().err
    assert "minisgl: kernels are not compiled" in text
    assert "Traceback" not in text


def test_compiler_errors_are_logged_without_a_traceback() -> None:
    failing = SLOW.replace('subprocess.run(["sleep", "600"])', "exec('raise RuntimeError(\"no nvcc\")')")
    options = b'{"config": {}, "log": ["warning", "text"], "background": false}\n'
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", failing], stdin=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(options)
        process.stdin.flush()  # but not closed: the process ends itself after its parent
        assert process.wait(timeout=120) == 1
        assert process.stderr.read().decode() == "minisgl: kernels are not compiled: RuntimeError: no nvcc\n"


def test_an_unresponsive_process_is_killed() -> None:
    process = start_kernel_compiler(EngineConfig.from_flat(attn="torch"), "warning", "text", background=True)
    process.send_signal(signal.SIGSTOP)
    stop_kernel_compiler(process)
    assert process.returncode == -signal.SIGKILL


def test_process_and_compilers_end_with_their_parent() -> None:
    options = b'{"config": {}, "log": ["warning", "text"], "background": true}\n'
    process = subprocess.Popen([sys.executable, "-c", SLOW], stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    process.stdin.write(options)
    process.stdin.flush()
    child = psutil.Process(process.pid)
    compilers: list[psutil.Process] = []
    while not compilers:
        assert process.poll() is None
        compilers = child.children()
    assert child.nice() == compilers[0].nice() == 19
    process.communicate()
    assert process.returncode == -9
    psutil.wait_procs(compilers, timeout=30)
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in compilers)


def test_the_process_group_of_the_parent_is_not_killed() -> None:
    starts = "run([sys.executable, '-c', sys.argv[1]], input=sys.stdin.buffer.read()).returncode"
    parent = [sys.executable, "-c", f"import sys; from subprocess import run; print({starts})", SLOW]
    options = b'{"config": {}, "log": ["warning", "text"], "background": true}\n'
    # A new session, so that a failure does not kill the test run.
    ended = subprocess.run(parent, input=options, capture_output=True, timeout=120, start_new_session=True)
    assert (ended.returncode, ended.stdout) == (0, b"-9\n")
