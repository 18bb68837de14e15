"""From prompts to tokens and back, for `LLM` and the tokenizer workers alike."""
