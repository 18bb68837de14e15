"""Progress bars for long-running work."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def progress_bar(wanted: bool = True) -> Progress:
    """Return a transient progress bar on stderr. It shows nothing if not `wanted` or if stderr is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # For a disabled bar, releases of rich before 15 print a newline.
    console.quiet = not (wanted and console.is_terminal)
    return Progress(*columns, console=console, disable=console.quiet, transient=True)
