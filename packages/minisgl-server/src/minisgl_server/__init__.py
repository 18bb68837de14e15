"""Server of minisgl: launcher, OpenAI-compatible API, tokenizer workers, shell and benchmarks."""
