"""Fused kernels between attention calls."""
