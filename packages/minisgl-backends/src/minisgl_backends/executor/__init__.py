"""Executors, which start the ranks of an engine."""
