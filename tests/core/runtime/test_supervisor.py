from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from minisgl_core.errors import WorkerDiedError, WorkerRefusedError
from minisgl_core.runtime.supervisor import END_SIGNAL, Supervisor

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # child processes import their functions by name
import children  # noqa: E402


@pytest.fixture
def supervisor():
    made = Supervisor()
    yield made
    made.terminate()


def test_children_report_ready_set_their_title_and_end(supervisor: Supervisor) -> None:
    supervisor.start("engine rank 0", children.serve, "engine rank 0")
    supervisor.start("tokenizer 0", children.serve, "tokenizer 0")
    assert supervisor.wait_ready()
    assert set(supervisor.ready) == {"engine rank 0", "tokenizer 0"}
    found = [psutil.Process(supervisor.pid(name)) for name in sorted(supervisor.ready)]
    assert [process.cmdline()[0] for process in found] == ["minisgl: engine rank 0", "minisgl: tokenizer 0"]
    supervisor.terminate()
    assert not any(process.is_running() for process in found)


def test_objects_of_the_start_are_frozen_for_garbage_collection(supervisor: Supervisor) -> None:
    supervisor.start("frozen", children.end_frozen)
    with pytest.raises(WorkerDiedError, match="17"):
        supervisor.wait()


def test_wait_without_a_timeout_checks_the_children(supervisor: Supervisor) -> None:
    supervisor.start("victim", children.serve, "victim")
    assert supervisor.wait_ready()
    assert not supervisor.wait(timeout_s=0)
    os.kill(supervisor.pid("victim"), signal.SIGKILL)

    def wait_repeatedly() -> None:
        for _ in range(100):
            supervisor.wait(timeout_s=0)
            time.sleep(0.05)

    with pytest.raises(WorkerDiedError, match="'victim' was killed by SIGKILL"):
        wait_repeatedly()


def test_wait_ends_at_its_timeout_and_when_the_pipe_is_written(supervisor: Supervisor) -> None:
    supervisor.start("slow", children.never_ready)
    assert not supervisor.wait_ready(timeout_s=0.1)
    reader, writer = os.pipe()
    os.write(writer, b"x")
    assert not supervisor.wait_ready(wake=reader)
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize(
    ("target", "args", "words"),
    [
        (children.fail_by_user, (), "--attn='nope' is not valid: must be one of torch. (in the process 'bad')"),
        (children.fail_by_bug, (), "'bad' failed: KeyError: 'oops'"),
        (children.fail_by_text, ("\ud800.json cannot be read",), "\\ud800.json cannot be read (in the process 'bad')"),
        (children.end_with, (7,), "'bad' ended unexpectedly with exit code 7"),
        (children.end_with, (0,), "'bad' ended unexpectedly with exit code 0"),
    ],
)
def test_errors_of_children_are_raised_in_the_parent(supervisor: Supervisor, target, args, words) -> None:
    supervisor.start("other", children.never_ready)
    supervisor.start("bad", target, *args)
    with pytest.raises(WorkerDiedError) as caught:
        supervisor.wait()
    assert words in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert isinstance(caught.value, WorkerRefusedError) == (target is children.fail_by_user)


@pytest.mark.parametrize("debug", ["0", "1"])
@pytest.mark.parametrize("target", [children.fail_by_bug, children.fail_by_user])
def test_tracebacks_of_bugs_are_logged_and_of_all_with_debug(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, debug: str, target
) -> None:
    monkeypatch.setenv("MINISGL_DEBUG", debug)
    supervisor.start("bad", target)
    with pytest.raises(WorkerDiedError):
        supervisor.wait()
    assert ("Traceback" in caplog.text) == (target is children.fail_by_bug or debug == "1")


def test_children_log_under_their_name(capfd: pytest.CaptureFixture[str]) -> None:
    supervisor = Supervisor(log_level="info")
    supervisor.start("talker", children.log_and_serve)
    supervisor.wait_ready()
    supervisor.terminate()
    logged = capfd.readouterr().err
    assert "INFO talker: heard" in logged
    assert "not heard" not in logged


def test_a_killed_child_is_named_before_those_that_fail(supervisor: Supervisor) -> None:
    supervisor.start("peer", children.fail_by_bug)
    supervisor.start("victim", children.serve, "victim")
    peer, victim = (psutil.Process(supervisor.pid(name)) for name in ("peer", "victim"))
    victim.kill()
    while any(process.status() != psutil.STATUS_ZOMBIE for process in (peer, victim)):
        time.sleep(0.01)  # do not wait: the supervisor must read their exit codes
    with pytest.raises(WorkerDiedError, match="'victim' was killed by SIGKILL"):
        supervisor.wait_ready()


def test_a_killed_child_is_named_if_its_peer_failed_earlier(supervisor: Supervisor) -> None:
    supervisor.start("peer", children.fail_by_bug)
    supervisor.start("victim", children.never_ready)
    peer, victim = (psutil.Process(supervisor.pid(name)) for name in ("peer", "victim"))
    while peer.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)  # do not wait: the supervisor must read its exit code
    killer = threading.Timer(0.3, victim.kill)
    killer.start()
    with pytest.raises(WorkerDiedError, match="'victim' was killed by SIGKILL"):
        supervisor.wait_ready()
    killer.join()


def test_a_killed_child_is_named_with_its_signal(supervisor: Supervisor) -> None:
    supervisor.start("victim", children.serve, "victim")
    supervisor.wait_ready()
    os.kill(supervisor.pid("victim"), signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="'victim' was killed by SIGKILL"):
        supervisor.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_children_ignore_terminal_signals(supervisor: Supervisor, number: int) -> None:
    supervisor.start("one", children.serve, "one")
    supervisor.wait_ready()
    os.kill(supervisor.pid("one"), number)
    assert not supervisor.wait(timeout_s=0.5), "the child still runs"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_children_ignore_terminal_signals_while_they_start(supervisor: Supervisor, number: int) -> None:
    supervisor.start("one", children.serve, "one")
    os.kill(supervisor.pid("one"), number)
    supervisor.wait_ready()
    assert number not in signal.pthread_sigmask(signal.SIG_BLOCK, []), "the parent has unblocked the signal"


def test_end_raises_no_error(supervisor: Supervisor) -> None:
    supervisor.start("one", children.serve, "one")
    supervisor.wait_ready()
    supervisor.end("one")
    assert supervisor.wait(lambda: not supervisor.is_alive("one"))


def test_a_child_that_loads_a_plugin_ends_when_asked(supervisor: Supervisor, site) -> None:
    """The module's import is interrupted. Other `SystemExit` in it are errors of the plugin."""
    ask_to_end = f"import os\nos.kill(os.getpid(), {int(END_SIGNAL)})"
    site.install("busy", {"hooks": {"busy": "busy_hooks"}}, busy_hooks=ask_to_end)
    supervisor.start("loader", children.load_hooks)
    with pytest.raises(WorkerDiedError, match="'loader' ended unexpectedly with exit code 0"):
        supervisor.wait_ready()


@pytest.mark.timeout(60)
def test_a_child_that_ends_during_the_condition_ends_the_wait(supervisor: Supervisor) -> None:
    supervisor.start("one", children.serve, "one")
    assert supervisor.wait_ready()
    pid = supervisor.pid("one")

    def has_ended() -> bool:
        if not supervisor.is_alive("one"):
            return True
        supervisor.end("one")
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it has ended before the condition returns
        return False

    assert supervisor.wait(has_ended, timeout_s=math.inf)


def test_children_that_ignore_sigterm_are_killed(supervisor: Supervisor) -> None:
    supervisor.start("deaf", children.serve_deaf)
    supervisor.wait_ready()
    child = psutil.Process(supervisor.pid("deaf"))
    supervisor.terminate(grace_s=0.2)
    assert not child.is_running()


def test_children_end_and_remove_files_if_the_parent_is_killed(tmp_path: Path) -> None:
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    pid_file = tmp_path / "pids"
    parent = subprocess.Popen([sys.executable, HERE.parent / "children.py", pid_file, sockets])
    try:
        while not pid_file.exists() or len(pid_file.read_text().split()) < 2:
            assert parent.poll() is None
        pids = [int(pid) for pid in pid_file.read_text().split()]
        processes = [psutil.Process(pid) for pid in pids]
    finally:
        parent.kill()
        parent.wait()
    gone, alive = psutil.wait_procs(processes, timeout=20)
    assert len(gone) == 2
    assert not alive
    assert not sockets.exists()
