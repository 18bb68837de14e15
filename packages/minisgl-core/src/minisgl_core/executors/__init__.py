"""Executors: where the ranks of an engine run."""
