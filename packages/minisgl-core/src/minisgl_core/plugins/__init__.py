"""The plugin seams: which kinds there are, how providers are found, and hooks."""
