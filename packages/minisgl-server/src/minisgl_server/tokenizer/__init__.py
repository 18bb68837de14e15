"""Tokenizer worker process: tokenizes prompts and detokenizes outputs."""
