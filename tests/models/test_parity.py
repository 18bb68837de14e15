"""Check that every architecture has all tests against transformers that docs/models.md promises.

The tests run in CI, except that `nox -s nightly` runs the greedy ones of most architectures on two ranks. `conftest`
lets none of them be skipped.
"""

from __future__ import annotations

import re
from pathlib import Path

import transformers
from config_cases import CASES, KIT_TESTS
from test_engine_parity import ARCHITECTURES

from minisgl_core.plugins.registry import Registry

DOCS = Path(__file__).parents[2] / "docs/models.md"


def test_every_architecture_has_all_tests() -> None:
    shipped = {
        entry.name
        for entry in Registry.from_environment({}).entries("models")
        if entry.distribution == "minisgl-models" and entry.name != "transformers"
    }
    assert shipped - {each.provider.__name__ for each in ARCHITECTURES} == set()
    for architecture in ARCHITECTURES:
        assert architecture.provider.__name__ in CASES
        assert all(getattr(architecture, test.partition("[")[0]) for test in KIT_TESTS), architecture


def test_the_docs_name_the_version_of_transformers() -> None:
    [version] = re.findall(r"with transformers (\d[\d.]*\d)", DOCS.read_text())
    assert transformers.__version__.startswith(version), (
        "run the tests with this version, then change it in docs/models.md"
    )
