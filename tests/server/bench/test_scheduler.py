"""``minisgl bench scheduler`` with a small cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from minisgl_core.cli.main import main

FLAGS = ("--steps", "20", "--cached-pages", "300", "--input-len", "40", "--requests", "1", "--requests", "9")


@pytest.mark.parametrize("flags", [(), ("--disable-overlap", "--page-size", "1"), ("--cache", "naive")])
def test_each_batch_size_has_a_row(flags: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    done = CliRunner().invoke(main, ["bench", "scheduler", *FLAGS, *flags, "--json", str(path)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = json.loads(path.read_text())["results"]
    assert [each["requests"] for each in found] == [1, 9]
    for each in found:
        assert min(each["schedule ms"], each["process ms"], each["encode ms"]) > 0
        assert each["us per request"] * each["requests"] == pytest.approx(1e3 * each["both ms"])
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["machine", "requests", "1", "9"]
