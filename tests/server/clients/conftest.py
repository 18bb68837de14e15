"""Client packages with a live server. `nox -s clients` installs them in a separate environment and runs this folder.

Each test belongs to a package and names a feature. With ``--client-table FILE``, the table between the two marks of a
Markdown file is rewritten from the passed tests. Without it, `test_table.py` compares the table with the tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

BEGIN, END = "<!-- generated: clients -->", "<!-- end -->"
_passed = pytest.StashKey[list[tuple[str, str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--client-table", type=Path, help="write the table of clients and features into this Markdown file"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "feature(package, name): a feature of a client package, for the table")
    config.stash[_passed] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    marker = item.get_closest_marker("feature")
    if marker is not None and report.when == "call" and report.passed:
        item.config.stash[_passed].append(marker.args)
    return report


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    path = session.config.getoption("--client-table", None)
    if path is not None and exitstatus == 0:
        text = path.read_text()
        table = "\n".join(rows(session.config.stash[_passed]))
        path.write_text(re.sub(f"(?s){BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{table}\n{END}", text))


def rows(features: list[tuple[str, str]]) -> list[str]:
    """Return the table, one line per package."""
    by_package: dict[str, list[str]] = {}
    for package, name in features:
        by_package.setdefault(package, []).append(name)
    lines = ["| package | version | tested features |", "|---|---|---|"]
    for package, names in sorted(by_package.items()):
        lines.append(f"| `{package}` | {version(package)} | {', '.join(dict.fromkeys(names))} |")
    return lines


@pytest.fixture(scope="session")
def base_url(server: Any) -> str:
    return f"{server.url}/v1"


@pytest.fixture(scope="session")
def model(http: Any) -> str:
    """The served model's name."""
    return str(http.get("/v1/models").json()["data"][0]["id"])


@pytest.fixture(autouse=True)
def _no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable telemetry, and set fake keys that the packages require."""
    for name in ("OPENAI_AGENTS_DISABLE_TRACING", "DO_NOT_TRACK", "LITELLM_LOCAL_MODEL_COST_MAP", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "none")
