"""Parsers that split the text of a model into reasoning content, tool calls and content."""
