"""How long work shows itself."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def progress_bar(wanted: bool = True) -> Progress:
    """A bar on stderr that goes away when it is done; quiet where it is not `wanted` or stderr is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not (wanted and console.is_terminal), transient=True)
