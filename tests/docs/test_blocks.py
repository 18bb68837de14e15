"""Every command and code block in README and docs is run by a test, or has a mark with the reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^ *(?P<fence>```+) *(?P<language>[\w-]*)[^\n]*\n.*?^ *(?P=fence)$", re.M | re.S
)
SHOWN = {"text"}
"""Languages of blocks that are only shown, such as messages."""
RUN_BY = {
    "README.md": "tests/docs/test_readme.py",
    "packages/minisgl-core/README.md": "tests/docs/test_site.py",
    "docs/index.md": "tests/docs/test_site.py",
    "docs/plugins/index.md": "tests/docs/test_site.py",
    "docs/plugins/attention.md": "tests/docs/test_guides.py",
    "docs/plugins/model.md": "tests/docs/test_guides.py",
    "docs/plugins/moe.md": "tests/docs/test_guides.py",
    "docs/plugins/ops.md": "tests/docs/test_guides.py",
    "docs/plugins/policy.md": "tests/docs/test_guides.py",
    "docs/plugins/prefix_cache.md": "tests/docs/test_guides.py",
    "docs/plugins/quantization.md": "tests/docs/test_guides.py",
    **{
        f"docs/plugins/{guide}.md": "tests/docs/test_guides.py"
        for guide in ("commands", "communicator", "executor", "grammar", "hooks", "platform", "router", "weights")
    },
    "docs/api.md": "tests/docs/test_api_page.py",
    "docs/benchmarking.md": "tests/server/bench/test_guide.py",
    "docs/fp8.md": "tests/server/bench/test_accuracy.py",
    "docs/structured_output.md": "tests/docs/test_structured_output.py",
}
"""The test that runs a page's blocks that are marked ``test: ...``; each fails for a mark that it does not know."""


def unmarked(text: str) -> list[str]:
    """Return blocks without a mark, and commands outside of blocks."""
    faults = [
        match[0]
        for match in BLOCK.finditer(text)
        if match["language"] not in SHOWN and not re.match("test: .|not tested: .", match["mark"] or "")
    ]
    outside = BLOCK.sub("", text)
    return [*faults, *re.findall(r"^ *(?:\$ |```|~~~).*", outside, re.M)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_is_run_or_has_a_reason(page: Path) -> None:
    text = page.read_text()
    assert unmarked(text) == []
    if any((match["mark"] or "").startswith("test: ") for match in BLOCK.finditer(text)):
        name = str(page.relative_to(ROOT))
        assert (ROOT / RUN_BY[name]).exists(), name


@pytest.mark.parametrize(
    "text",
    [
        "```python\n1 / 0\n```\n",
        "```console\n$ minisgl launch\n```\n",
        "```\nminisgl launch\n```\n",
        "<!-- not tested: -->\n```sh\nls\n```\n",
        "<!-- test: a -->\n\n```sh\nls\n```\n",
        "Type\n\n    $ minisgl launch\n",
        "~~~python\n1 / 0\n~~~\n",
    ],
)
def test_a_block_without_a_mark_is_found(text: str) -> None:
    assert unmarked(text)
    assert not unmarked("<!-- test: a -->\n```sh\nls\n```\n\n<!-- not tested: it needs a GPU -->\n```sh\nls\n```\n")
