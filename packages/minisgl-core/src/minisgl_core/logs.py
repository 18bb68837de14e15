"""How processes log: to standard error, as lines for people or as JSON for programs."""

from __future__ import annotations

import logging
import time
from contextvars import ContextVar
from typing import Any

import msgspec

REQUEST_ID: ContextVar[str] = ContextVar("minisgl_request_id", default="")
"""The HTTP request that this context works for; log records made meanwhile carry it."""
FORMATS = ("text", "json")

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "request_id", "color_message"}
_encode = msgspec.json.Encoder(enc_hook=str).encode


def configure(process: str, level: str, log_format: str) -> None:
    """Log from this process on.

    Args:
        process: its name in each line.
        level: the least important records to log, such as ``info``.
        log_format: one of `FORMATS`.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else TextFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class TextFormatter(logging.Formatter):
    """``2026-01-02 03:04:05,678 INFO api: [request id] message``."""

    def __init__(self, process: str) -> None:
        super().__init__("%(asctime)s")  # so that the base class works out the time
        self._line = f"%(asctime)s %(levelname)s {process.replace('%', '%%')}: %(request)s%(message)s"

    def formatMessage(self, record: logging.LogRecord) -> str:  # the name is the base class's
        """One line, before the traceback."""
        request_id = _request_id(record)
        return self._line % {**vars(record), "request": f"[{request_id}] " if request_id else ""}


class JsonFormatter(logging.Formatter):
    """One object a line: ``time`` (UTC), ``level``, ``process``, ``logger``, ``message``, and what else is known.

    ``request_id`` and ``exception`` where there are any; whatever was logged with ``extra=`` besides, by its name.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := _request_id(record):
            line["request_id"] = request_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        return _encode(line).decode()


def _request_id(record: logging.LogRecord) -> str:
    """What the record was logged with, or else what this context works for."""
    return str(vars(record).get("request_id") or REQUEST_ID.get())
