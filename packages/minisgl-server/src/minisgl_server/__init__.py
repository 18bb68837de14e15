"""The minisgl server: launcher, OpenAI-compatible API, tokenizer workers, shell and benchmarks."""
