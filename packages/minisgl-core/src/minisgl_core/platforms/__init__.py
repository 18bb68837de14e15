"""Platforms that ship with minisgl: CPU and CUDA."""
