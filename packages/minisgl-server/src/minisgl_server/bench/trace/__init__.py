"""Traces of requests: the Qwen-Bailian format, and a generator of synthetic traces."""
