"""Plugins: kinds, discovery of providers, and hooks."""
