"""The table of docs/clients.md names the features that these tests cover."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
GUIDE = HERE.parents[2] / "docs/clients.md"


def test_table_has_exactly_the_features_of_the_tests(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--client-table", None) is not None:
        pytest.skip("the table is being written")
    marks = re.compile(r'mark\.feature\(\s*"([^"]+)",\s*"([^"]+)"')
    expected = {found for path in HERE.glob("test_*.py") for found in marks.findall(path.read_text())}
    table = re.search("(?s)<!-- generated: clients -->(.*?)<!-- end -->", GUIDE.read_text())
    assert table is not None
    cells = [line.strip("| \n").split(" | ") for line in table[1].splitlines() if line.startswith("| `")]
    packages = [cell[0].strip("`") for cell in cells]
    assert packages == sorted({package for package, _ in expected})
    for package, _, names in cells:
        features = {name for owner, name in expected if owner == package.strip("`")}
        assert names == ", ".join(sorted(features, key=names.find))


def test_requirements_pin_every_package() -> None:
    lines = (HERE / "requirements.txt").read_text().splitlines()
    assert [line for line in lines if line and not line.startswith("#") and "==" not in line] == []
