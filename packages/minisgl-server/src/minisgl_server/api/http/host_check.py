"""Middleware that checks the headers Host and Origin: pages of other sites must not use this server through a browser."""

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl_server.api.errors import ApiError
from minisgl_server.api.public_paths import PROBED_PATHS

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class HostMiddleware:
    """Refuses requests to host names that are not `allowed`: names as `minisgl_server.launch.allowed_hosts` returns them.

    This stops DNS rebinding: ``evil.example`` resolves to 127.0.0.1, so that requests of its page have its own origin, and
    only the Host header reveals them. Requests without the header do not come from browsers, and are passed on.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app = app
        self._names = frozenset(name for name in allowed if not name.startswith("*."))
        self._domains = tuple(name[1:] for name in allowed if name.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 403."""
        if scope["type"] == "http" and scope["path"].rstrip("/") not in PROBED_PATHS:
            for host in Headers(scope=scope).getlist("host"):
                name = _without_port(host)
                if name not in self._names and not name.endswith(self._domains):
                    message = f"The host {host!r} is not allowed. Start the server with --allowed-hosts NAME."
                    return await ApiError(403, message, "Host", "host_not_allowed").send(scope, receive, send)
        return await self._app(scope, receive, send)


class OriginMiddleware:
    """Refuses requests other than GET, HEAD and OPTIONS from web pages of other origins, unless they are `allowed` or "*" is.

    Browsers send some of them without a CORS preflight, such as those of forms, and would only hide the response.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app, self._allowed = app, frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 403."""
        if scope["type"] == "http" and scope["method"] not in _SAFE_METHODS:
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if origin is not None and not self._is_allowed(origin, headers):
                message = (
                    f"Web pages of the origin {origin!r} may not use this server. Start it with --cors-origin ORIGIN to"
                    " allow them."
                )
                return await ApiError(403, message, "Origin", "origin_not_allowed").send(scope, receive, send)
        return await self._app(scope, receive, send)

    def _is_allowed(self, origin: str, headers: Headers) -> bool:
        if "*" in self._allowed or origin in self._allowed:
            return True
        # The origin of this server's own page equals Host. If a proxy has changed Host, Sec-Fetch-Site still tells.
        is_own = origin.partition("://")[2].lower() == headers.get("host", "").lower()
        return is_own or headers.get("sec-fetch-site") == "same-origin"


def _without_port(host: str) -> str:
    """Return the name in a Host header."""
    name = host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
    return name.lower().rstrip(".")
