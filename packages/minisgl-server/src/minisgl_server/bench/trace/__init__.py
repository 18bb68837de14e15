"""Traces of requests: the format of the Qwen-Bailian traces, and a generator of such a trace."""
