"""Every flag that README and the pages name exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import cli_reference
from minisgl_core.utils.suggestions import OTHER_NAMES, WITHOUT_COUNTERPART

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(set((ROOT / "docs").rglob("*.md")) - {ROOT / "docs/renames.md"})]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*(?![\w-])")
OF_OTHERS = {
    "--enable-cache-report",
    "--enable-prompt-tokens-details",
    "--no-deps",
    "--tmpfs",
    "--ulimit",
}
"""Flags of Docker, SGLang, vLLM and pip that the pages name outside of a command and of the table of such flags."""
OF_ENGINES = {f"--{name.replace('_', '-')}" for names in (*OTHER_NAMES.values(), WITHOUT_COUNTERPART) for name in names}
COMMANDS = {
    words: {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)} | {"--help"}
    for words, command in cli_reference.commands()
}
OF_SCRIPTS = set(FLAG.findall("".join(path.read_text() for path in ROOT.glob("scripts/**/*.py"))))


def unknown_flags(text: str) -> Iterator[tuple[str, str]]:
    """Yield code spans and lines of consoles that have an unknown flag, with the flag."""
    spans = re.findall(r"`([^`]+)`", re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S))
    for span in spans + re.findall(r"^\$ (.*)$", text, re.M):
        code = " ".join(span.split())
        words = max((each for each in COMMANDS if f"{code} ".startswith(f"{each} ")), key=len, default="")
        if words in ("", "minisgl"):  # a flag alone, or a command of a plugin
            known = set().union(*COMMANDS.values()) | OF_SCRIPTS | OF_OTHERS | OF_ENGINES
            flags = FLAG.findall(code) if code.startswith("--") else []
        else:
            known, flags = COMMANDS[words], FLAG.findall(code)
        yield from ((code, flag) for flag in flags if flag not in known)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_exist(page: Path) -> None:
    assert list(unknown_flags(page.read_text())) == []


def test_the_table_of_flags_of_other_engines_is_complete() -> None:
    table = (ROOT / "docs/cli.md").read_text().split("<!-- test: other flags -->")[1].split("\n\n")[0]
    shown = {}
    for row in table.splitlines()[3:]:
        here, *others = (each.removeprefix("--").replace("-", "_") for each in FLAG.findall(row))
        shown[here] = sorted(set(others))
    flags = {name: f"--{name.replace('_', '-')}" for name in OTHER_NAMES}
    known = {name for name, flag in flags.items() if flag in COMMANDS["minisgl launch"]}
    assert shown == {name: sorted(OTHER_NAMES[name]) for name in known}


def test_the_table_of_flags_without_counterpart_is_complete() -> None:
    table = (ROOT / "docs/cli.md").read_text().split("<!-- test: flags without counterpart -->")[1].split("\n\n")[0]
    shown = {}
    for row in table.splitlines()[3:]:
        _, flags, reason, _ = row.split("|")
        shown |= {flag[2:].replace("-", "_"): reason.strip().replace("`", "") for flag in FLAG.findall(flags)}
    assert shown == WITHOUT_COUNTERPART
    assert not {f"--{name.replace('_', '-')}" for name in shown} & COMMANDS["minisgl launch"]


@pytest.mark.parametrize(
    "text",
    [
        "`--pagesize`",
        "`minisgl launch --num-turns 2`",
        "$ minisgl bench serve --tp 2\n",
        "```console\n$ ls\n```\n\nText `--pagesize` more.",
    ],
)
def test_an_unknown_flag_is_found(text: str) -> None:
    assert list(unknown_flags(text))
