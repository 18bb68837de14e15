"""Helpers that do not depend on the engine."""
