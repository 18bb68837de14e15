"""Grammar backends for structured outputs."""
