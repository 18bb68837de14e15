"""The page on structured output shows nothing that does not work."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs/structured_output.md").read_text()
BLOCKS = dict(re.findall(r"<!-- test: (\w+) -->\n```python\n(.*?)^```$", PAGE, re.M | re.S))


def run_python(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_block_is_tested() -> None:
    assert list(BLOCKS) == ["run", "server"]
    assert PAGE.count("```python") == 2


def test_in_a_program() -> None:
    text = "\n".join(run_python(BLOCKS["run"]))
    *first, pattern, choice, grammar = text.splitlines()
    described = json.loads("\n".join(first))
    assert list(described) == ["city", "is_capital"]
    assert re.fullmatch("(large|small), on the [A-Z][a-z]+", pattern)
    assert choice in ("town", "village")
    assert grammar in ("Paris!", "Paris?")


def test_by_the_api(url: str) -> None:
    weather, *call = run_python(BLOCKS["server"].replace("http://127.0.0.1:1919", url))
    assert re.fullmatch(r"sky='(clear|cloudy)' is_windy=(True|False)", weather)
    name, arguments = "\n".join(call).split(" ", 1)
    assert name == "set_unit"
    assert json.loads(arguments)["unit"] in ("C", "F")
