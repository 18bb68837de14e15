"""What a model writes, taken apart: thoughts, tool calls, and the text for the user."""
