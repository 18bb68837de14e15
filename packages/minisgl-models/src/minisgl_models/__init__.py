"""Model architectures for minisgl, and the GGUF checkpoint format."""
