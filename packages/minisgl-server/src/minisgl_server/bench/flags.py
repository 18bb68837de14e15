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


def given_flags(ctx: click.Context) -> dict[str, Any]:
    """Return the flags given on the command line, with their values."""
    return {
        param.opts[0]: ctx.params[param.name]
        for param in ctx.command.params
        if param.name in ctx.params and ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
    }


def refuse_flags(given: Mapping[str, Any], refused: Mapping[str, Iterable[str]]) -> None:
    """Refuse flags that would have no effect.

    Args:
        refused: flags to refuse, by what is allowed instead, as a phrase that follows "must be".
    """
    for allowed, names in refused.items():
        for name in names:
            if name in given:
                raise InvalidValueError(name, given[name], allowed)
