"""A minimal attention backend, prefix cache, model and hook module for minisgl."""
