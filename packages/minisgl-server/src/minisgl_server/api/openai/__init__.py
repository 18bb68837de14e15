"""OpenAI chat completions and completions, and the parts that all generation routes share."""
