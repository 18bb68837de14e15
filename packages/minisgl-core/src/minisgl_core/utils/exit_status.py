"""Exit of processes: the exception that ends a child process, and the description of exit statuses."""

import signal


class EndRequest(SystemExit):
    """Raised in a child process that its parent asks to end. Code that catches a plugin's `SystemExit` lets it pass."""


def describe_exit(exitcode: int | None) -> str:
    """Return a phrase to follow a process's name, such as ``was killed by SIGTERM``.

    `exitcode` is None if the process still runs although its pipe is closed.
    """
    if exitcode is None:
        return "closed its pipe and hangs"
    if exitcode >= 0:
        return f"ended unexpectedly with exit code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    hint = " (Linux does this when memory runs out)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
