"""Names every request and logs it at its end."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl_core.logs import REQUEST_ID

logger = logging.getLogger(__name__)

_GIVEN = re.compile(rb"[!-~]{1,128}")
"""Names that a client may give: printable, so that they can stand in headers and log lines."""
_KEY = "minisgl.access"
_POLLED = frozenset({"/health", "/ready", "/ping", "/metrics", "/engine/state"})
"""What programs, or the page, ask every few seconds or more often; logged at debug."""


@dataclass(slots=True)
class Access:
    """What the log says of one HTTP request.

    Attributes:
        status: of the answer; 0 before there is one.
        is_cut: the client hung up before the end.
        usage: tells OpenAI's usage, where something was generated.
    """

    started_s: float = field(default_factory=time.perf_counter)
    status: int = 0
    is_cut: bool = False
    usage: Callable[[], dict[str, Any]] | None = None


def access_of(scope: Scope) -> Access:
    """The request's own; a new one for an application without `RequestLog`."""
    found: Access = scope.setdefault(_KEY, Access())
    return found


class RequestLog:
    """The outermost layer.

    A request is named by its X-Request-Id, or by a fresh one where it has none that fits. The answer carries it in the same
    header, whatever it is, and log records made meanwhile carry it too; see `minisgl_core.logs`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = given if _GIVEN.fullmatch(given) else uuid.uuid4().hex[:16].encode()
        access = scope[_KEY] = Access()

        def send_named(message: Message) -> Any:
            # No coroutine of its own: this is called for each chunk.
            if message["type"] == "http.response.start":
                access.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            return send(message)

        token = REQUEST_ID.set(request_id.decode())
        try:
            await self._app(scope, receive, send_named)
        finally:
            level = logging.DEBUG if scope["path"] in _POLLED else logging.INFO
            if logger.isEnabledFor(level):
                _log(level, scope, access)
            REQUEST_ID.reset(token)


def _log(level: int, scope: Scope, access: Access) -> None:
    """One line; the query is left out, as some put secrets there."""
    fields: dict[str, Any] = {
        "method": scope["method"],
        "path": scope["path"],
        "status": access.status,
        "duration_s": round(time.perf_counter() - access.started_s, 4),
    }
    text = "%(method)s %(path)r %(status)d in %(duration_s).3f s"
    if access.usage is not None:
        usage = access.usage()
        fields["prompt_tokens"], fields["output_tokens"] = usage["prompt_tokens"], usage["completion_tokens"]
        fields["cached_tokens"] = usage["prompt_tokens_details"]["cached_tokens"]
        text += ", %(prompt_tokens)d prompt tokens (%(cached_tokens)d cached), %(output_tokens)d output tokens"
    if access.is_cut:
        fields["client_gone"] = True
        text += ", the client hung up"
    logger.log(level, text, fields, extra=fields)
