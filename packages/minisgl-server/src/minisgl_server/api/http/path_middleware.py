"""Middleware for HEAD requests and trailing slashes on every route."""

from collections.abc import Sequence

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send


class PathMiddleware:
    """Handles HEAD as GET, and a path with a trailing slash as the path without it, if one of `routes` matches that.

    uvicorn sends no body to HEAD. There is no redirect, as several clients drop the body of a POST request when they follow one.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self._app, self._routes = app, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            if path.endswith("/") and path != "/":
                without = {**scope, "path": path.rstrip("/")}
                if any(route.matches(without)[0] != Match.NONE for route in self._routes):
                    scope = without
            if scope["method"] == "HEAD":
                scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)
