"""The ``minisgl`` command. It imports torch only when a command needs it."""
