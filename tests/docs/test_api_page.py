"""The examples of the page on the HTTP API run. tests/server/test_native_api.py sends its JSON bodies."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/api.md").read_text()
BLOCKS = dict(re.findall(r"<!-- test: ([\w ]+) -->\n```python\n(.*?)^```$", PAGE, re.M | re.S))


def test_every_block_is_tested() -> None:
    assert list(BLOCKS) == ["responses example", "messages example"]
    assert PAGE.count("```") == 2 * (len(BLOCKS) + PAGE.count("```json"))


@pytest.mark.parametrize("name", ["responses example", "messages example"])
def test_example(url: str, name: str, run_python: Callable[[str], str]) -> None:
    """Each answer is the one that the page shows in a comment."""
    output = run_python(BLOCKS[name].replace("http://127.0.0.1:1919", url))
    assert output.splitlines() == re.findall(r"^print.*  # (.*)$", BLOCKS[name], re.M)
