"""How a worker of a phase speaks to the process that prints the table."""

from __future__ import annotations

import json
from typing import Any

Result = dict[str, Any]


def report(**values: Any) -> None:
    """Hand a result over."""
    print("RESULT", json.dumps(values), flush=True)
