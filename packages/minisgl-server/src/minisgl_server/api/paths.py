"""HEAD requests and trailing slashes, for every route."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadAndSlashes:
    """Answers HEAD as GET without the body, and a path with a trailing slash as the path without it.

    A redirect would do for the slash, but several clients drop the body of a POST request when they follow one.

    Args:
        app: what is asked.
        routes: its routes; a path that one of them has with its slash keeps it.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self._app, self._routes = app, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on."""
        if scope["type"] == "http":
            path = scope["path"]
            if path.endswith("/") and path != "/":
                without = {**scope, "path": path.rstrip("/")}
                if any(route.matches(without)[0] != Match.NONE for route in self._routes):
                    scope = without
            if scope["method"] == "HEAD":
                scope, send = {**scope, "method": "GET"}, _without_body(send)
        await self._app(scope, receive, send)


def _without_body(send: Send) -> Send:
    """`send` that leaves bodies out; the header Content-Length still tells the length that GET would answer with."""

    async def send_headers(message: Message) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return send_headers
