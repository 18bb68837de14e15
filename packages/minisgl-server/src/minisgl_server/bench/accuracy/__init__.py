"""``minisgl bench accuracy``: what fewer bits cost."""
