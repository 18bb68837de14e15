"""Description of a process's exit status."""

import signal


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
