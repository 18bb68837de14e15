"""Insert a section per module into the pages of the API reference, for mkdocstrings to fill from docstrings.

mkdocs.yml names this file as a hook. A line of the page such as ``<!-- modules: minisgl_core.contracts.* -->`` becomes
a heading and mkdocstrings' directive for every module that matches the pattern.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parents[1] / "packages"
PATTERN = re.compile(r"<!-- modules: (\S+) -->")
DIRECTIVE = """\
## {title}

::: {module}
    options:
      show_root_heading: false
      show_root_toc_entry: false
"""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the placeholders of a page; called by mkdocs."""
    return PATTERN.sub(lambda match: _sections(match[1]), markdown)


def modules(pattern: str) -> list[str]:
    """Return the dotted names of the packages' modules that match a glob pattern, sorted."""
    found = []
    for src in SOURCES.glob("*/src"):
        for path in src.rglob("*.py"):
            name = ".".join(path.relative_to(src).with_suffix("").parts)
            if path.stem != "__init__" and fnmatchcase(name, pattern):
                found.append(name)
    return sorted(found)


def _sections(pattern: str) -> str:
    package = pattern.rpartition(".")[0]
    return "\n".join(DIRECTIVE.format(title=_title(name, package), module=name) for name in modules(pattern))


def _title(module: str, package: str) -> str:
    """Return "Ops: linear" for the module ops.linear of the package."""
    words = module.removeprefix(f"{package}.").removesuffix("_kit").replace(".", ": ").replace("_", " ")
    return words[0].upper() + words[1:]
