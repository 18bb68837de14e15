"""Prometheus metrics: what the engine counts, and how a server shows it."""
