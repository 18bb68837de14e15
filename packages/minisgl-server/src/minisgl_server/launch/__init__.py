"""`minisgl launch`."""
