"""Everything that the page on structured output shows works."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs/structured_output.md").read_text()
BLOCKS = dict(re.findall(r"<!-- test: (\w+) -->\n```python\n(.*?)^```$", PAGE, re.M | re.S))


def test_every_block_is_tested() -> None:
    assert list(BLOCKS) == ["run", "server", "tools"]
    assert PAGE.count("```python") == 3


def test_the_examples_in_a_program(run_python: Callable[[str], str]) -> None:
    *first, pattern, choice, grammar = run_python(BLOCKS["run"]).splitlines()
    described = json.loads("\n".join(first))
    assert list(described) == ["city", "is_capital"]
    assert re.fullmatch("Paris is (large|small), in the (north|south) of France", pattern)
    assert choice in ("town", "village")
    assert grammar in ("Paris!", "Paris?")


def test_the_examples_with_the_api(url: str, run_python: Callable[[str], str]) -> None:
    code = BLOCKS["server"].replace("http://127.0.0.1:1919", url) + BLOCKS["tools"]
    weather, *call = run_python(code).splitlines()
    assert re.fullmatch(r"sky='(clear|cloudy)' is_windy=(True|False)", weather)
    name, arguments = "\n".join(call).split(" ", 1)
    assert name == "set_unit"
    assert json.loads(arguments)["unit"] in ("C", "F")
