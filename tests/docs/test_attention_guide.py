"""The guide's backend passes the kit as the guide shows it, and its entry point is one of minisgl's."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from minisgl_core.contracts.attention import AttentionBackend
from minisgl_core.plugins.kinds import KINDS

GUIDE = (Path(__file__).parents[2] / "docs/plugins/attention.md").read_text()
BLOCK = re.compile(r"(?:^<!-- test: (?P<mark>[^\n]*) -->\n)?^```\w*\n(?P<code>.*?)^```$", re.M | re.S)


@pytest.fixture
def blocks(tmp_path: Path) -> dict[str, str]:
    """Code by mark; files are written to `tmp_path`."""
    found = {str(match["mark"]): match["code"] for match in BLOCK.finditer(GUIDE)}
    for mark, code in found.items():
        if mark.startswith("file "):
            (tmp_path / mark.removeprefix("file ")).write_text(code)
    return found


def test_every_block_is_tested(blocks: dict[str, str]) -> None:
    assert list(blocks) == ["file minisgl_loop.py", "file test_loop.py", "entry point"]


def test_the_backend_passes_the_kit(blocks: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_loop.py"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"2\d passed, 5 skipped", done.stdout), "all but graphs and rotations are to run"


def test_the_entry_point(blocks: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [(group, points)] = tomllib.loads(blocks["entry point"])["project"]["entry-points"].items()
    assert group == KINDS["attention"].group
    [(name, value)] = points.items()
    assert f"--attn {name}`" in GUIDE
    module, _, attribute = value.partition(":")
    monkeypatch.syspath_prepend(tmp_path)
    assert issubclass(getattr(importlib.import_module(module), attribute), AttentionBackend)
