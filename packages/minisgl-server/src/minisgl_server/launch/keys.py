"""API keys, from where the user keeps them to the form in which they are checked."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from minisgl_core.errors import InvalidValueError
from minisgl_server.options import ServerOptions

KEY_VARIABLE = "MINISGL_API_KEY"


def key_digests(options: ServerOptions) -> list[bytes]:
    """SHA-256 of every key; empty where none is asked for. No error repeats a key.

    Raises:
        InvalidValueError: a key that no header can carry, a file that cannot be read, or a source of keys that has none: it
            was meant to close the server, and must not leave it open.
    """
    if os.environ.get(KEY_VARIABLE) is not None and not os.environ[KEY_VARIABLE].strip() and not options.api_key:
        raise InvalidValueError(KEY_VARIABLE, "", "an API key", "Unset it to serve without one.")
    keys = [("--api-key", key) for key in options.api_key]
    if options.api_key_file is not None:
        keys += _read(options.api_key_file)
    for source, key in keys:
        if not (key.isascii() and key.isprintable() and key and " " not in key):
            allowed = "keys of printable ASCII characters without spaces, at least one long"
            raise InvalidValueError(source, "a key (not shown)", allowed)
    return [hashlib.sha256(key.encode()).digest() for _, key in keys]


def first_key(keys: str | None) -> str | None:
    """What a client sends of `KEY_VARIABLE`, where a server may have found several keys."""
    return next(iter((keys or "").split()), None)


def _read(path: str) -> list[tuple[str, str]]:
    """Where each key is, and the key."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise InvalidValueError("--api-key-file", path, "a text file that can be read", f"{reason}.") from None
    keys = [(f"line {place} of --api-key-file", line.strip()) for place, line in enumerate(lines, 1) if line.strip()]
    if not keys:
        raise InvalidValueError("--api-key-file", path, "a file with at least one key")
    return keys
