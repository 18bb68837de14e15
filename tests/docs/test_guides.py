"""Each guide's example passes its kit as the guide shows it, and its entry point is one of minisgl's."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from pkgutil import resolve_name

import pytest

from minisgl_core.plugins.kinds import KINDS

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"(?:^<!-- test: (?P<mark>[^\n]*) -->\n)?^```\w*\n(?P<code>.*?)^```$", re.M | re.S)
NUM_TESTS = {"prefix_cache": 25, "model": 6, "moe": 20}
"""By guide: how many of the kit's tests run at least."""
NOT_FOR_THE_GUIDE = {"prefix_cache": "this cache shows nothing"}
"""By guide: why tests may be skipped, where it leaves out what is optional."""


@pytest.mark.parametrize("guide", NUM_TESTS)
def test_guide(guide: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DOCS / f"plugins/{guide}.md").read_text()
    blocks = {str(match["mark"]): match["code"] for match in BLOCK.finditer(text)}
    [module, test, point] = blocks
    for mark in (module, test):
        (tmp_path / mark.removeprefix("file ")).write_text(blocks[mark])

    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", test.removeprefix("file ")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) >= NUM_TESTS[guide], done.stdout
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all(line.endswith(NOT_FOR_THE_GUIDE.get(guide, "none is")) for line in skipped), done.stdout

    kind = KINDS[point.removeprefix("entry point ")]
    [(group, points)] = tomllib.loads(blocks[point])["project"]["entry-points"].items()
    assert group == kind.group
    [(name, value)] = points.items()
    assert not kind.flag or f"{kind.flag} {name}`" in text
    monkeypatch.syspath_prepend(tmp_path)
    provider, _, attribute = value.partition(":")
    assert issubclass(getattr(importlib.import_module(provider), attribute), resolve_name(kind.contract))


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_names_and_links_exist(page: Path) -> None:
    """Modules and classes of ours that a page names, and files that it links to."""
    text = page.read_text()
    for name in set(re.findall(r"`(minisgl_(?:core|backends|models|server)(?:\.\w+)+)`", text)):
        resolve_name(name)
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), link
