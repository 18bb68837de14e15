"""How the C kernels are compiled, kept and refused."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minisgl_backends.native import library

CPU = torch.device("cpu")
ASK = """
import torch
from minisgl_backends.native import library
print(library.unsupported(torch.device("cpu"), torch.float32))
"""

if reasons := library.unsupported(CPU, torch.float32):
    pytest.skip("; ".join(reasons), allow_module_level=True)


def ask(**environment: str) -> subprocess.Popen[str]:
    """What a fresh process says."""
    full = {**os.environ, **environment}
    return subprocess.Popen([sys.executable, "-c", ASK], env=full, stdout=subprocess.PIPE, text=True)


def test_processes_that_compile_at_once_share_the_result(tmp_path: Path) -> None:
    answers = [process.communicate()[0] for process in [ask(XDG_CACHE_HOME=str(tmp_path)) for _ in range(2)]]
    assert answers == ["[]\n", "[]\n"]
    left = list((tmp_path / "minisgl" / "native").iterdir())
    assert len(left) == 1, left
    assert stat.S_IMODE(left[0].parent.stat().st_mode) == 0o700


def test_a_compiler_that_fails_is_a_reason(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'x.c:1: error: no such thing' >&2\nexit 1\n")
    broken.chmod(0o755)
    answer = ask(CC=str(broken), XDG_CACHE_HOME=str(tmp_path)).communicate()[0]
    assert "no such thing" in answer
    assert str(broken) in answer


def test_no_compiler_is_a_reason_with_a_remedy(tmp_path: Path) -> None:
    assert "install gcc" in ask(CC=str(tmp_path / "absent")).communicate()[0]


def test_a_cache_that_cannot_be_used_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "minisgl").write_text("a file where the folder should be")
    assert ask(XDG_CACHE_HOME=str(tmp_path)).communicate()[0] == "[]\n"


def test_what_it_is_not_for() -> None:
    assert "for CPUs" in library.unsupported(torch.device("cuda"), torch.bfloat16)[0]
    assert "float16" in library.unsupported(CPU, torch.float16)[0]
