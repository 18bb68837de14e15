"""Paths of the API that need no API key."""

PROBED_PATHS = frozenset({"/health", "/ready", "/ping"})
"""Paths that load balancers may poll, without an API key and under any host name."""


class PublicPaths:
    """Set of paths that `ApiKeyMiddleware` lets pass; `app.state.public_paths` of the API server.

    A route that a plugin adds needs a key, unless the plugin adds its path here. Such a route must reveal nothing but that
    the server runs, and must not cost the engine anything.
    """

    def __init__(self) -> None:
        self._paths = set(PROBED_PATHS)
        self._prefixes: tuple[str, ...] = ()

    def add(self, path: str) -> None:
        """Add a path. One that ends in a slash stands for all paths below it; "/" is only itself."""
        if path.endswith("/") and path != "/":
            self._prefixes += (path,)
        else:
            self._paths.add(path)

    def __contains__(self, path: str) -> bool:
        return (path.rstrip("/") or "/") in self._paths or path.startswith(self._prefixes)
