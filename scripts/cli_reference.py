"""Writes the reference of the command line: every command and option of the project's packages, from click's own objects.

mkdocs.yml names this file as a hook, so that the page `cli.md` cannot drift from the program. To print it::

    python scripts/cli_reference.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from minisgl_core.cli.main import KNOWN_COMMANDS, main
from minisgl_core.plugins.registry import Registry

PAGE, PLACE = "cli.md", "<!-- commands -->"
"""Page of the reference, and its placeholder there."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in the page of the command line; called by mkdocs."""
    return markdown.replace(PLACE, cli_reference()) if page.file.src_uri == PAGE else markdown


def cli_reference() -> str:
    """Return Markdown: a section per command, with a table of its options."""
    return "\n".join(_section(words, command) for words, command in commands())


def commands() -> Iterator[tuple[str, click.Command]]:
    """Yield the command line and the command of each shipped command, without those of installed plugins."""
    yield "minisgl", main
    registry = Registry.from_environment({})
    for name in KNOWN_COMMANDS:
        yield from _with_subcommands(f"minisgl {name}", registry.load("commands", name))


def _with_subcommands(words: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield words, command
    if isinstance(command, click.Group):
        for name, each in command.commands.items():
            yield from _with_subcommands(f"{words} {name}", each)


def _section(words: str, command: click.Command) -> str:
    context = click.Context(command, info_name=words)
    usage = " ".join(command.collect_usage_pieces(context))
    options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
    lines = [f"## {words}", "", _plain(command.help or ""), "", f"`{words} {usage}`", ""]
    if options:
        lines += ["| option | default | |", "|---|---|---|", *(_row(option) for option in options), ""]
    return "\n".join(lines)


def _row(option: click.Option) -> str:
    info = option.to_info_dict()
    value = "" if option.is_flag or option.count else " " + (option.metavar or _type(option))
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    default = "on" if info["default"] is True else info["default"]
    shown = "" if default is None or default is False or default == () else f"`{default}`"
    value = f" `{value.strip()}`" if value else ""
    return f"| {names}{value} | {shown} | {_plain(option.help or '')} |"


def _type(option: click.Option) -> str:
    kind = option.type
    if isinstance(kind, click.Choice):
        return f"[{'|'.join(map(str, kind.choices))}]"
    name = kind.name.upper().removesuffix(" RANGE")
    if isinstance(kind, (click.IntRange, click.FloatRange)):
        name += "" if kind.min is None else f" {'>' if kind.min_open else '>='} {kind.min}"
        name += "" if kind.max is None else f" {'<' if kind.max_open else '<='} {kind.max}"
    return name


def _plain(text: str) -> str:
    """Return text with Markdown's special characters escaped."""
    text = " ".join(text.replace("\b", "").split())
    for character in "\\*_<|":
        text = text.replace(character, f"&#{ord(character)};")
    return text


if __name__ == "__main__":
    print(cli_reference())
