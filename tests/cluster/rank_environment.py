"""Rank that writes its environment variables to a file; actors import this module."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

from minisgl_core.protocol.messages import Ready


def write(path: str, report: Callable[[Ready], None]) -> None:
    Path(path).write_text(json.dumps(dict(os.environ)))
    report(Ready(process="rank"))
    signal.pause()  # otherwise the supervisor reports an exited rank as an error
