"""Command ``minisgl bench serve``: load on an OpenAI-compatible server, and its latency and throughput."""
