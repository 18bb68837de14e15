"""Matrices of fewer bits."""
