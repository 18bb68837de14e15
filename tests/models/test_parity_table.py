"""The parity table of docs/models.md: a cell for every test that compares an architecture with transformers, and no other.

The tests run in CI, except that `nox -s nightly` runs the greedy ones of most architectures on two ranks. `conftest` lets none of
them be skipped.
"""

from __future__ import annotations

import re
from pathlib import Path

import transformers
from config_cases import BY_KIT, CASES
from test_engine_parity import ARCHITECTURES, OPTIONS

DOCS = Path(__file__).parents[2] / "docs/models.md"
GREEDY = {"page-1": "greedy, pages of 1", "page-16": "greedy, pages of 16", "tp-2": "greedy, 2 ranks"}
KEYS = "config keys"


def table() -> str:
    """Return the table in Markdown."""
    columns = (*BY_KIT.values(), *GREEDY.values(), KEYS)
    lines = [f"| architecture | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, kit in sorted({each.provider.__name__: each for each in ARCHITECTURES}.items()):
        shown = {column for test, column in BY_KIT.items() if getattr(kit, test.partition("[")[0])}
        shown |= {GREEDY[option] for option in OPTIONS} | ({KEYS} if name in CASES else set())
        lines.append(f"| `{name}` | {' | '.join('yes' if each in shown else '' for each in columns)} |")
    return "\n".join(lines)


def test_the_parity_table_equals_the_test_results() -> None:
    found = re.search(
        r"with transformers ([\d.]+):\n\n(\| architecture \| logits .*?)\n\n", DOCS.read_text(), re.DOTALL
    )
    assert found, "docs/models.md has no parity table"
    version, rows = found.groups()
    assert rows == table(), f"docs/models.md must have this table:\n{table()}"
    assert transformers.__version__.startswith(version), (
        "run the tests with this version, then change it in docs/models.md"
    )
