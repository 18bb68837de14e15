"""Flag handling that several ``minisgl bench`` commands share. Must not import heavy packages."""

import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import click
from click.core import ParameterSource

from minisgl_core.errors import InvalidValueError


def _check_writable(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuse a file that cannot be written before the measurement; the file is not created yet."""
    if value is None:
        return None
    path, why = Path(value), ""
    if path.is_dir():
        why = "It is a folder."
    elif not path.parent.is_dir():
        why = f"There is no folder {path.parent}."
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "There is no write permission."
    if why:
        raise InvalidValueError(param.opts[0], value, "a file that can be written", why)
    return value


file_option = partial(click.option, metavar="FILE", callback=_check_writable)
"""Decorator that adds an option for a file to write."""
json_option = file_option("--json", "json_file", help="Also write the results to this file.")
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
