"""Where what is compiled at run time is kept for the next time."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_dir(kind: str) -> Path | None:
    """The user's folder for builds of a kind, or None where there is none that can be written."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        path = Path(base, "minisgl", kind)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return path if os.access(path, os.W_OK | os.X_OK) else None


def keep(data: bytes, path: Path) -> None:
    """Put a file into the cache, in one piece: several processes may do so at once.

    Raises:
        OSError: it cannot be written.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        copy = Path(folder, path.name)
        with copy.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # where a power cut leaves a part of it, loading it would end the process
        try:
            os.replace(copy, path)
        except OSError:
            if not path.exists():  # gVisor's may fail where another process does the same at the same time
                raise
