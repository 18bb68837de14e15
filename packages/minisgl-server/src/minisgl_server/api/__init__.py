"""OpenAI-compatible API server. Imports neither torch nor transformers."""
