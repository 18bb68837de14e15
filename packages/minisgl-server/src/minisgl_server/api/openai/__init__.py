"""OpenAI's chat completions and completions, and the parts that every generation route shares."""
