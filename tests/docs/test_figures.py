"""Figures of the docs equal the output of their script, with the numbers of the docs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import docs_figures

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BENCHMARKS = (ROOT / "docs/benchmarks.md").read_text()


@pytest.mark.parametrize("name", sorted(docs_figures.figures()))
def test_committed_figures_are_current(name: str) -> None:
    """`python scripts/docs_figures.py` updates the figures."""
    assert (docs_figures.IMAGES / name).read_text() == docs_figures.figures()[name]


def data(name: str) -> dict[str, Any]:
    return dict(json.loads((docs_figures.DATA / name).read_text()))


def cells(text: str) -> list[str]:
    return [cell.strip() for cell in text.strip("|").split("|")]


def test_offline_numbers_are_in_the_table() -> None:
    for row in data("offline.json")["rows"]:
        values = [row["tokens_per_s"].get(engine) for engine in docs_figures.COLORS]
        found = [line for line in BENCHMARKS.splitlines() if cells(line)[0] == row["model"]]
        assert [f"{value:,}" if value else "" for value in values] == cells(found[0])[1:3]
        if all(values):
            assert f" {values[0]:,} and {values[1]:,}" in README, "the description of the figure"


def test_online_numbers_are_in_the_table() -> None:
    for row in data("online.json")["rows"]:
        shown = [
            " / ".join(f"{value:.1f}" for value in row[engine][field])
            for field in ("ttft_ms", "tpot_ms")
            for engine in ("vLLM 0.23.0", "minisgl")
        ]
        assert f"| {row['requests_per_s']} | {' | '.join(shown)} |" in BENCHMARKS


def test_chart_data_names_commit_hardware_command_and_date() -> None:
    for path in docs_figures.DATA.glob("*.json"):
        found = data(path.name)
        assert re.fullmatch("[0-9a-f]{7}", found["commit"])
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
        assert found["hardware"]
        assert found["command"]


def test_readme_and_benchmarks_stay_short() -> None:
    for name in ("README.md", "docs/benchmarks.md"):
        assert len((ROOT / name).read_text().splitlines()) <= 150, name
