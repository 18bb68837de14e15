"""Anthropic Messages API. Each request is translated into a `ChatRequest`, and each output into content blocks and events."""
