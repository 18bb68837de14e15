"""Checks of Host and Origin: a web page of another site must not use this server through its visitor's browser."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl_server.api.errors import ApiError

PROBED_PATHS = frozenset({"/health", "/ready"})
"""Load balancers ask here by any name; the answers tell nothing but that a server is there."""
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class HostCheck:
    """Refuse requests to a name that is not this server's.

    By DNS rebinding, a page of ``evil.example`` has that name resolve to 127.0.0.1: what its script asks for then is of its
    own origin, and only the Host header tells. A request without one comes from no browser and is let through.

    Args:
        app: what is protected.
        allowed: names as `minisgl_server.launch.hosts.allowed_hosts` returns them, without "*".
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app = app
        self._names = frozenset(name for name in allowed if not name.startswith("*."))
        self._domains = tuple(name[1:] for name in allowed if name.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or answer 403."""
        if scope["type"] == "http" and scope["path"] not in PROBED_PATHS:
            for host in Headers(scope=scope).getlist("host"):
                if not self._is_allowed(_name(host)):
                    message = (
                        f"The host {host!r} is not served here. Start the server with --allowed-hosts NAME to allow it."
                    )
                    return await ApiError(403, message, "Host", "host_not_allowed").response(scope["path"])(
                        scope, receive, send
                    )
        return await self._app(scope, receive, send)

    def _is_allowed(self, name: str) -> bool:
        return name in self._names or name.endswith(self._domains)


class OriginCheck:
    """Refuse requests that change or compute something and come from web pages of origins not allowed.

    A browser sends some of them without asking first, as of forms; only the answer would be kept from the page.

    Args:
        app: what is protected.
        allowed: origins such as ``https://chat.example``; "*" allows all.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app, self._allowed = app, frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or answer 403."""
        if scope["type"] == "http" and scope["method"] not in _SAFE_METHODS:
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if origin is not None and not self._is_allowed(origin, headers):
                message = (
                    f"Web pages of the origin {origin!r} may not use this server. Start it with --cors-origin ORIGIN to"
                    " allow them."
                )
                return await ApiError(403, message, "Origin", "origin_not_allowed").response(scope["path"])(
                    scope, receive, send
                )
        return await self._app(scope, receive, send)

    def _is_allowed(self, origin: str, headers: Headers) -> bool:
        if "*" in self._allowed or origin in self._allowed:
            return True
        # Browsers set this one themselves. A proxy may have changed Host, which an own page's origin equals otherwise.
        is_own = origin.partition("://")[2].lower() == headers.get("host", "").lower()
        return is_own or headers.get("sec-fetch-site") == "same-origin"


def _name(host: str) -> str:
    """Host header without its port."""
    name = host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
    return name.lower().rstrip(".")
