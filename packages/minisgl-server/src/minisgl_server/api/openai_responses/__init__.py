"""OpenAI Responses API. Each request is translated into a `ChatRequest`, and each output into items and events."""
