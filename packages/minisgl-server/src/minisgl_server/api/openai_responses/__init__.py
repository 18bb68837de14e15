"""OpenAI's Responses API. Each request becomes a `ChatRequest`, and each output items and typed events."""
