"""Grammars of structured outputs."""
