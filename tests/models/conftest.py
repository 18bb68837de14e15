"""Fails a skipped test that the parity table of docs/models.md rests on."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
from config_cases import BY_KIT


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    kit: Any = getattr(item, "cls", None)
    file = item.path.name
    is_plain = "__test__" in vars(kit or object)  # the plain class of an architecture
    is_shown = file == "test_architectures.py" and item.name in BY_KIT and is_plain
    if report.skipped and (is_shown or file in ("test_engine_parity.py", "test_config_keys.py")):
        report.outcome, report.longrepr = "failed", "the parity table of docs/models.md rests on this test"
    return report
