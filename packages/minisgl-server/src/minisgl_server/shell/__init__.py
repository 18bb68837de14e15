"""Command `minisgl shell`."""
