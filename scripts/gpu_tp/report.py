"""Results that a phase's worker sends to the process that prints the table."""

from __future__ import annotations

import json
from typing import Any

Result = dict[str, Any]


def report(**values: Any) -> None:
    """Send a result."""
    print("RESULT", json.dumps(values), flush=True)
