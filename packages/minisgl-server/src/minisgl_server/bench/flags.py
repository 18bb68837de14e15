"""Flag handling that several ``minisgl bench`` commands share. Must not import heavy packages."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from minisgl_core.errors import InvalidValueError


class OutputFile(click.Path):
    """File to write. A path that cannot be written is refused before the measurement; the file is not created yet."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path; raises InvalidValueError if it cannot be written."""
        path = Path(value)
        if path.is_dir():
            why = "It is a folder."
        elif not path.parent.is_dir():
            why = f"There is no folder {path.parent}."
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            why = "There is no write permission."
        else:
            return value
        raise InvalidValueError(param.opts[0] if param else "the file", value, "a file that can be written", why)


json_option = click.option("--json", "json_file", type=OutputFile(), help="Also write the results to this file.")
"""Decorator that adds ``--json``."""


def refuse_flags(ctx: click.Context, refused: Mapping[str, Iterable[str]]) -> None:
    """Refuse flags of the command line that would have no effect.

    Args:
        refused: flags to refuse, by what is allowed instead, as a phrase that follows "must be".
    """
    for param in ctx.command.params:
        flag, name = param.opts[0], param.name or ""
        for allowed, flags in refused.items():
            if flag in flags and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise InvalidValueError(flag, ctx.params[name], allowed)
