"""Providers of quantization."""
