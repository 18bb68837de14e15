"""Middleware that gives every request an id, and logs it when it ends."""

import logging
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl_core.utils.logs import REQUEST_ID
from minisgl_server.api.public_paths import PROBED_PATHS

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(rb"[!-~]{1,128}")
"""Ids that a client may choose: printable, as they are returned in a header and written to the log."""
ANTHROPIC_PATH = "/v1/messages"
"""Prefix of the paths of Anthropic's API, whose client expects the id in the header ``request-id``."""

_KEY = "minisgl.access"
"""Key of the `AccessRecord` in the ASGI scope."""
_POLLED_PATHS = PROBED_PATHS | {"/metrics", "/engine/state"}
"""Paths that programs or the web UI poll; logged at debug level."""


@dataclass(slots=True)
class AccessRecord:
    """Log record of one HTTP request. The status is 0 before there is a response; `usage` returns OpenAI's usage object."""

    started_s: float = field(default_factory=time.perf_counter)
    status: int = 0
    client_gone: bool = False
    usage: Callable[[], dict[str, Any]] | None = None


def access_record(scope: Scope) -> AccessRecord:
    """Return the record of a request; a new one if the application has no `RequestLogMiddleware`."""
    record: AccessRecord = scope.setdefault(_KEY, AccessRecord())
    return record


class RequestLogMiddleware:
    """Gives every request an id and logs it; the outermost middleware.

    The id of a request is its X-Request-Id header, or a new id if there is none or it is invalid. Every response returns it
    in the same header, and all log records of the request have it; see `minisgl_core.utils.logs`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex[:16].encode()
        id_headers = (
            (b"x-request-id", b"request-id") if scope["path"].startswith(ANTHROPIC_PATH) else (b"x-request-id",)
        )
        record = scope[_KEY] = AccessRecord()

        def send_with_id(message: Message) -> Any:
            # Not a coroutine, as it is called for each chunk.
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], *((name, request_id) for name in id_headers)]
            return send(message)

        token = REQUEST_ID.set(request_id.decode())
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            level = logging.DEBUG if scope["path"] in _POLLED_PATHS else logging.INFO
            if logger.isEnabledFor(level):
                _log(level, scope, record)
            REQUEST_ID.reset(token)


def _log(level: int, scope: Scope, record: AccessRecord) -> None:
    """Log one line; the query string is left out, as clients may put secrets there."""
    fields: dict[str, Any] = {
        "method": scope["method"],
        "path": scope["path"],
        "status": record.status,
        "duration_s": round(time.perf_counter() - record.started_s, 4),
    }
    text = "%(method)s %(path)r %(status)d in %(duration_s).3f s"
    if record.usage is not None:
        usage = record.usage()
        fields["prompt_tokens"], fields["output_tokens"] = usage["prompt_tokens"], usage["completion_tokens"]
        fields["cached_tokens"] = usage["prompt_tokens_details"]["cached_tokens"]
        text += ", %(prompt_tokens)d prompt tokens (%(cached_tokens)d cached), %(output_tokens)d output tokens"
    if record.client_gone:
        fields["client_gone"] = True
        text += ", the client disconnected"
    logger.log(level, text, fields, extra=fields)
