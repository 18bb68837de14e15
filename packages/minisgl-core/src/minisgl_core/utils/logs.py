"""Logging to standard error, as text or as JSON lines."""

import json
import logging
import time
from contextvars import ContextVar
from typing import Any

import msgspec

REQUEST_ID: ContextVar[str] = ContextVar("minisgl_request_id", default="")
"""Id of the HTTP request that this context handles; its log records carry the id."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "request_id", "color_message"}
_encode = msgspec.json.Encoder(enc_hook=str).encode


def configure(process: str, level: str, log_format: str) -> None:
    """Configure logging of this process, from a lowest level such as ``info``. `log_format` is ``text`` or ``json``."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else TextFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class TextFormatter(logging.Formatter):
    """Formatter of lines such as ``2026-01-02 03:04:05,678 INFO api: [request id] message``."""

    def __init__(self, process: str) -> None:
        super().__init__("%(asctime)s")  # the base class formats the time only if its format contains it
        self._line = f"%(asctime)s %(levelname)s {process.replace('%', '%%')}: %(request)s%(message)s"

    def formatMessage(self, record: logging.LogRecord) -> str:  # named by the base class
        """Return the line, without a traceback."""
        request_id = _request_id(record)
        return self._line % {**vars(record), "request": f"[{request_id}] " if request_id else ""}


class JsonFormatter(logging.Formatter):
    """Formatter of one JSON object per line: ``time`` (UTC), ``level``, ``process``, ``logger`` and ``message``.

    ``request_id`` and ``exception`` are present if there is one. Values logged with ``extra=`` appear under their names.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
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
        try:
            return _encode(line).decode()
        except UnicodeEncodeError:  # a lone surrogate, as in the name of a file that is not UTF-8
            return json.dumps(line, default=str)


def _request_id(record: logging.LogRecord) -> str:
    """Return the request id of the record, or that of this context."""
    return str(vars(record).get("request_id") or REQUEST_ID.get())
