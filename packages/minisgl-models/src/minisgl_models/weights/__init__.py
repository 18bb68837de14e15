"""Checkpoint formats: providers of the `minisgl.weights` group."""
