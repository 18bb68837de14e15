"""Command `minisgl launch`."""
