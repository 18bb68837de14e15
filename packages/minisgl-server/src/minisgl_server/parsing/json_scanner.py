"""Follows the structure of a JSON text, character by character."""


class JsonScanner:
    """Follows the strings of a JSON text, and the `depth` of its open brackets."""

    depth = 0
    in_string = _is_escaped = False

    def push(self, char: str) -> None:
        """Add one character."""
        if self.in_string:
            self.in_string = char != '"' or self._is_escaped
            self._is_escaped = char == "\\" and not self._is_escaped
        elif char == '"':
            self.in_string = True
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1
