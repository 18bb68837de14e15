"""`minisgl shell`."""
