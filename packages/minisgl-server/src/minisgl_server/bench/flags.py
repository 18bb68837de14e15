"""Flag handling that several ``minisgl bench`` commands share. Must not import heavy packages."""

import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from minisgl_core.errors import InvalidValueError


class FloatRange(click.FloatRange):
    """Range of numbers. Unlike click's, it refuses NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


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


file_option = partial(click.option, type=click.Path(readable=False), metavar="FILE", callback=_check_writable)
"""Decorator that adds an option for a file to write."""
json_option = file_option("--json", "json_file", help="Also write the results to this file.")
"""Decorator that adds ``--json``."""


def refuse_flags(ctx: click.Context, condition: object, allowed: str, *flags: str) -> None:
    """Refuse flags of the command line if a condition holds, under which they have no effect. `allowed` follows "must be"."""
    for param in ctx.command.params if condition else ():
        name = param.name or ""
        if param.opts[0] in flags and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise InvalidValueError(param.opts[0], ctx.params[name], allowed)
