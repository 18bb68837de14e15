"""Results of `scripts/gpu_tp` for all ends of its workers; needs no GPU."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "scripts/gpu_tp"
RESULT = {"phase": "tokens", "tp": 2, "what": "all", "ok": True, "note": ""}
REPORT = """echo 'RESULT {"phase": "tokens", "tp": 2, "what": "all", "ok": true, "note": ""}'\n"""
RunWorker = Callable[[str, int], list[dict[str, Any]]]


@pytest.fixture
def run_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunWorker:
    """Run a shell script as the worker, with a limit in seconds, and return the results."""
    monkeypatch.syspath_prepend(FOLDER)
    module = importlib.import_module("gpu_tp.__main__")
    worker = tmp_path / "worker"
    monkeypatch.setattr(sys, "executable", str(worker))

    def run(script: str, limit_s: int) -> list[dict[str, Any]]:
        worker.write_text(f"#!/bin/sh\n{script}")
        worker.chmod(0o755)
        monkeypatch.setitem(module.LIMITS_S, "tokens", limit_s)
        results: list[dict[str, Any]] = module.run_part(tmp_path, "tokens", "tokens", 2)
        return results

    return run


def test_a_successful_worker_adds_no_result(run_worker: RunWorker) -> None:
    assert run_worker(REPORT, 600) == [RESULT]


@pytest.mark.parametrize(
    ("script", "limit_s", "note"), [("exit 3", 600, "exit status 3 after"), ("sleep 600", 0, "ended after 0 s")]
)
def test_a_worker_that_fails_or_hangs_is_reported(run_worker: RunWorker, script: str, limit_s: int, note: str) -> None:
    (found,) = run_worker(script, limit_s)
    assert not found["ok"]
    assert found["note"].startswith(note)


def test_processes_that_outlive_their_worker_are_reported(
    run_worker: RunWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_group = os.killpg

    def once_ended(worker: int, number: signal.Signals) -> None:
        os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
        kill_group(worker, number)

    monkeypatch.setattr(os, "killpg", once_ended)
    found = run_worker(f"sleep 600 &\n{REPORT}", 0)
    assert found[0] == RESULT
    assert [(each["ok"], each["note"]) for each in found[1:]] == [(False, "left processes behind")]
