"""Hook that fails skipped tests that docs/models.md describes."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
from config_cases import KIT_TESTS


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    kit: Any = getattr(item, "cls", None)
    file = item.path.name
    is_plain = "__test__" in vars(kit or object)  # the base class of an architecture's tests
    is_described = file == "test_architectures.py" and item.name in KIT_TESTS and is_plain
    if report.skipped and (is_described or file in ("test_engine_parity.py", "test_config_keys.py")):
        report.outcome, report.longrepr = "failed", "docs/models.md says that this test passes"
    return report
