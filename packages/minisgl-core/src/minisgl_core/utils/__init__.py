"""Helpers that know nothing of the engine."""
