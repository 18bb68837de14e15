"""Processes of a running engine: supervision, sockets, executors, the worker of a rank and its step loop."""
