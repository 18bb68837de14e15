"""Prometheus metrics: hooks that update them in the engine, and the route that serves them."""
