"""Grammar compilers for structured outputs."""
