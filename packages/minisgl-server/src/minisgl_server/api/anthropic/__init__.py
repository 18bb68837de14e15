"""Anthropic's Messages API. Each request becomes a `ChatRequest`, and each output content blocks and typed events."""
