"""``minisgl bench attention``: attention providers side by side on this machine."""
