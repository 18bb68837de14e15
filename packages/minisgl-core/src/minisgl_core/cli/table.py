"""Printing of tables on standard output."""

import sys
from collections.abc import Sequence

import click


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a rich table on a terminal, and aligned columns elsewhere."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(*titles)
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for row in (titles, *rows):
        click.echo("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
