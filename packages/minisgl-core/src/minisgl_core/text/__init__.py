"""Chat templates, tokenization and detokenization, for `LLM` and the tokenizer workers."""
