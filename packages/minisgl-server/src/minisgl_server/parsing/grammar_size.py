"""Limit on the grammar of the tool calls of a request, which applies while the grammar is made."""

import json
from typing import Any

from minisgl_core.contracts.grammar import MAX_GRAMMAR_BYTES

_OVERHEAD_BYTES = 8
"""Bytes that count for any parts, so that the number of parts is limited, too."""


class UnsupportedSchemaError(Exception):
    """A schema that a grammar cannot enforce. The message says why."""


class GrammarSize:
    """Size of the grammar of all calls of a request so far.

    Each reference to a definition repeats it, so that a small request may have a large grammar. Making it takes time, for which
    the outputs of other requests wait.
    """

    _num_bytes = 0

    def add(self, parts: Any) -> str:
        """Add parts, and return them as JSON.

        Raises:
            UnsupportedSchemaError: the grammar is too large.
        """
        text, limit = json.dumps(parts), MAX_GRAMMAR_BYTES["tool_calls"]
        self._num_bytes += len(text) + _OVERHEAD_BYTES
        if self._num_bytes > limit:
            raise UnsupportedSchemaError(f"its grammar, with those of the tools before, has more than {limit} bytes")
        return text
