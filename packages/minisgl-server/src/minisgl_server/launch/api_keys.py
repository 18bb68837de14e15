"""Collects the API keys of ``--api-key`` and ``--api-key-file``, and hashes them.

`API_KEY_VARIABLE` is the environment variable of ``--api-key``, so its keys are in `ServerOptions.api_key`.
"""

import hashlib
import os
from pathlib import Path

from minisgl_core.errors import InvalidValueError, Summary
from minisgl_server.options import ServerOptions

API_KEY_VARIABLE = "MINISGL_API_KEY"


def api_key_digests(options: ServerOptions) -> list[bytes]:
    """Return the SHA-256 of every key; empty if no key is required. Errors do not contain keys.

    A source without keys is a mistake, which must not leave the server without authentication.
    """
    variable = os.environ.get(API_KEY_VARIABLE)
    if variable is not None and not variable.strip() and not options.api_key:
        raise InvalidValueError(API_KEY_VARIABLE, "", "an API key", "Unset it to serve without one.")
    keys = [("--api-key", key) for key in options.api_key]
    if options.api_key_file is not None:
        keys += _read(options.api_key_file)
    for source, key in keys:
        if not (key.isascii() and key.isprintable() and key and " " not in key):
            allowed = "one or more printable ASCII characters without spaces"
            raise InvalidValueError(source, Summary("a key, not shown"), allowed)
    return [hashlib.sha256(key.encode()).digest() for _, key in keys]


def _read(path: str) -> list[tuple[str, str]]:
    """Return each key of a file, with a description of its source."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidValueError("--api-key-file", path, "a text file that can be read", f"{reason}.") from None
    keys = [(f"line {number} of --api-key-file", line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not keys:
        raise InvalidValueError("--api-key-file", path, "a file with at least one key")
    return keys
