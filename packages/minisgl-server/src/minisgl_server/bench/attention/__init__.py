"""Command ``minisgl bench attention``: checks and times attention providers on this machine."""
