"""Collectives between tensor-parallel ranks."""
