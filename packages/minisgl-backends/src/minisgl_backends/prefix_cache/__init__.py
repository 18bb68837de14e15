"""Prefix caches."""
