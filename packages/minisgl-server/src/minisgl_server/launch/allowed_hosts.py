"""Host names under which clients may reach the server, and origins of web pages that may use it."""

import re
import socket
from ipaddress import ip_address

from minisgl_core.errors import InvalidValueError
from minisgl_server.options import ServerOptions

_NAME = re.compile(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\]")
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+")


def check_origins(options: ServerOptions) -> None:
    """Raise `InvalidValueError` for an origin that no browser sends, such as one with a path."""
    for origin in options.cors_origin:
        if not _ORIGIN.fullmatch(origin):
            allowed = (
                "'*' or an origin as browsers send it, in lower case and without path, such as https://chat.example.com"
            )
            raise InvalidValueError("--cors-origin", origin, allowed)


def allowed_hosts(options: ServerOptions, address: str) -> tuple[str, ...]:
    """Return the allowed names in lower case, or a single "*" for any name.

    The names of this host are always allowed. DNS rebinding, which this check prevents, needs a name of the attacker's domain.
    """
    given = [name.lower() for name in options.allowed_hosts]
    for name in given:
        if not _NAME.fullmatch(name):
            allowed = "a host name or address without scheme and port, such as api.example.com, *.example.com or [::1]"
            raise InvalidValueError("--allowed-hosts", name, allowed)
    if "*" in given or not (given or ip_address(address).is_loopback):
        return ("*",)
    host = options.host.lower()
    local = ["localhost", "127.0.0.1", "[::1]", socket.gethostname().lower(), f"[{host}]" if ":" in host else host]
    return tuple(dict.fromkeys([*local, *given]))
