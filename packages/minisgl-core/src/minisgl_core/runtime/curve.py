"""Encryption and authentication of TCP sockets with CURVE (rfc.zeromq.org/spec/26).

The ranks of an engine share one secret key, which is part of their addresses: ``tcp://KEY@host:port``. So an address is a secret.
A receiver refuses peers that have another key or none.
"""

from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

MAX_MESSAGE_BYTES = 256 << 20
"""Longest message that a receiver allocates memory for. The largest plans and results have a few megabytes."""


def new_key() -> str:
    """Return a new secret key, in hexadecimal, since CURVE's own Z85 encoding uses characters such as ``@`` and ``/``."""
    return z85.decode(zmq.curve_keypair()[1]).hex()


def tcp_address(host: str, port: int, key: str) -> str:
    """Return the address of a TCP socket whose peers must have the secret key `key`."""
    return f"tcp://{key}@[{host}]:{port}" if ":" in host else f"tcp://{key}@{host}:{port}"


def secure(socket: Any, address: str, accepts: bool) -> tuple[str, ThreadAuthenticator | None]:
    """Set up encryption of a socket before it is bound or connected.

    Args:
        socket: the socket.
        address: its address; only a ``tcp://`` address needs encryption.
        accepts: True if it will be bound, False if it will be connected.

    Returns:
        The address without the key, and the authenticator to stop before the context is terminated, if there is one.

    Raises:
        ValueError: a ``tcp://`` address has no key.
    """
    if not address.startswith("tcp://"):
        return address, None
    parts = urlsplit(address)
    if parts.username is None:
        raise ValueError(f"{address} has no key, which minisgl_core.runtime.curve.tcp_address adds")
    socket.maxmsgsize = MAX_MESSAGE_BYTES  # also limits the handshake of a peer that has not proven to have the key
    secret = z85.encode(bytes.fromhex(parts.username))
    public = zmq.curve_public(secret)
    socket.ipv6 = ":" in (parts.hostname or "")
    socket.curve_secretkey, socket.curve_publickey = secret, public
    authenticator = None
    if accepts:
        authenticator = ThreadAuthenticator(socket.context)
        authenticator.start()
        # A peer has proven that it has the secret key of `peer_public`.
        allowed = SimpleNamespace(callback=lambda domain, peer_public: peer_public == public)
        authenticator.configure_curve_callback("*", allowed)
        socket.curve_server = True
    else:
        socket.curve_serverkey = public
    return f"tcp://{parts.netloc.rpartition('@')[2]}", authenticator
