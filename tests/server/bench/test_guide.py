"""The commands of the benchmarking guide run, at a smaller size."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from minisgl_core.cli.main import main

GUIDE = (Path(__file__).parents[3] / "docs/benchmarking.md").read_text()
BLOCK = re.compile(r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```\w*\n(?P<code>.*?)^```$", re.M | re.S)
SMALL = ["--num-requests", "4", "--input-len", "8", "--output-len", "2", "--num-warmups", "0"]


def commands(mark: str) -> list[list[str]]:
    """Return the commands of the blocks with this mark, without ``minisgl``."""
    found = [match["code"] for match in BLOCK.finditer(GUIDE) if match["mark"] == f"test: {mark}"]
    words = [shlex.split(line.removeprefix("$ ")) for code in found for line in code.splitlines()]
    assert all(each[:2] == ["minisgl", "bench"] for each in words)
    return [each[1:] for each in words]


def run(arguments: list[str]) -> str:
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_block_is_tested_or_says_why_not() -> None:
    known = {f"test: {mark}" for mark in ("offline", "serve", "trace", "route", "attention", "scheduler")}
    for match in BLOCK.finditer(GUIDE):
        assert match["mark"] in known or match["mark"].startswith("not tested: it needs"), match[0]


def test_offline(folder: Path, tiny_checkpoint: Path) -> None:
    [arguments] = commands("offline")
    small = ["--model", str(tiny_checkpoint), "--num-pages", "400", "--input-len", "4", "--output-len", "2"]
    run([*arguments, *small, "--repeats", "1", "--prefill-len", "8"])
    engines = [result["engine"] for result in json.loads((folder / "offline.json").read_text())["results"]]
    assert engines == ["minisgl", "transformers"] * 3


@pytest.mark.parametrize("arguments", commands("serve"), ids=lambda arguments: " ".join(arguments[2:])[:40])
def test_serve(server: Any, folder: Path, arguments: list[str]) -> None:
    faster = ["--turn-delay", "0"] if "--turn-delay" in arguments else []
    shorter = ["--shared-prefix-tokens", "16"] if "--shared-prefix-tokens" in arguments else []
    shown = run([*arguments, *SMALL, "--url", server.url, *faster, *shorter])
    for line in shown.partition("\nrun ")[2].split("\n\n")[0].splitlines()[1:]:
        assert re.search(r"  4 +4 +0  ", line), "sent, completed, failed"
    if "--plot" in arguments:
        assert (folder / "sweep.svg").stat().st_size > 10_000
        assert len(json.loads((folder / "sweep.json").read_text())["runs"]) == 3


def test_trace(server: Any, folder: Path) -> None:
    make, replay, show = commands("trace")
    shown = run([*make, "--num-requests", "40", "--request-rate", "60", "--output-median", "2"])
    assert "input tokens, median" in shown
    small = ["--url", server.url, "--num-requests", "6", "--max-input-len", "300", "--num-warmups", "0"]
    run([*replay, *small])
    runs = json.loads((folder / "replay.json").read_text())["runs"]
    assert [(each["time_scale"], each["num_failed"]) for each in runs] == [(0.4, 0), (0.8, 0)]
    assert runs[0]["num_completed"] == runs[1]["num_completed"] > 0
    assert run(show) == shown


def test_route(folder: Path) -> None:
    chats, make, replay = commands("route")
    shown = run([*chats, "--num-requests", "40", "--output-len", "4"])
    run([*make, "--num-requests", "40"])
    for text in (shown, run(replay)):
        assert [line.split("  ")[0] for line in text.splitlines()[1:5]] == [
            "round-robin",
            "least-loaded",
            "prefix",
            "one replica",
        ]
    assert (folder / "routers.json").exists()


def test_attention() -> None:
    [arguments] = commands("attention")
    rows = [line.split() for line in run([*arguments, "--repeats", "1"]).splitlines() if line.startswith("torch")]
    assert [(row[1], *row[2:4]) for row in rows] == [
        (size, *step) for size in ("1", "16") for step in (("decode", "8x1024"), ("prefill", "1x512"))
    ]


def test_scheduler() -> None:
    [arguments] = commands("scheduler")
    shown = run([*arguments, "--cached-pages", "1000", "--input-len", "8", "--steps", "2"])
    assert [line.split()[0] for line in shown.splitlines()[2:]] == ["64", "1,024", "4,096"]
