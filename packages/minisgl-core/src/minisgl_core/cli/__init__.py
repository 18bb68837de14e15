"""The ``minisgl`` command. It imports torch only when a command needs it."""

import sys


def run() -> None:
    """Run the ``minisgl`` command. Ctrl-C during its imports, which take most of its start, ends it as click does later."""
    try:
        from minisgl_core.cli.main import main
    except KeyboardInterrupt:
        sys.exit("\nAborted!")
    main()
