"""``minisgl bench serve``: load on a server that speaks OpenAI's API, and what became of it."""
