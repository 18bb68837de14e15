"""Cache of kernels compiled at run time. Its files are loaded as code, so only the user may have write access."""

import logging
import os
import stat
import tempfile
from functools import cache
from pathlib import Path

_LOG = logging.getLogger(__name__)
_REMEDY = "correct the owner or mode (chown, chmod go-w), or set XDG_CACHE_HOME to a private folder"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_dir(kind: str) -> Path | None:
    """Return the user's cache folder for builds of a kind, such as ``native``, or None if it is not private.

    It may be read-only, as in a container whose image has the kernels. The folder and its parent ``minisgl`` must belong to the
    user, and nobody else may be able to write them. The folders above must belong to the user or root. Everyone may write those
    only if the sticky bit is set, as in /tmp.
    """
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = base.resolve(strict=True)
        reason = next((why for above in (path, *path.parents) if (why := _unsafe_above(above))), None)
        for name in ("minisgl", kind):
            if reason is not None:
                break
            path = path / name
            path.mkdir(mode=0o700, exist_ok=True)
            reason = _unsafe(path, stat.S_IFDIR)
    except (OSError, RuntimeError) as error:  # the folder is missing on a read-only file system; no home directory
        reason = str(error).rstrip(".")
    if reason is not None:
        _warn(f"compiled kernels are not cached but compiled at each start, since {reason}: {_REMEDY}")
        return None
    return path


def is_cached(path: Path) -> bool:
    """Return True if a file is in the cache and only the user could have written it."""
    if not path.exists():
        return False
    reason = _unsafe(path, stat.S_IFREG)
    if reason is not None:
        _warn(f"kernels are recompiled, since {reason}")
    return reason is None


def write_atomically(data: bytes, path: Path) -> None:
    """Write a file of the cache. Several processes may write the same file at once.

    Raises:
        OSError: the file cannot be written.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        copy = Path(folder, path.name)
        with open(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # loading a file that a power cut truncated would crash the process
        try:
            os.replace(copy, path)
        except OSError:
            if not path.exists():  # in gVisor, os.replace may fail if another process does the same at once
                raise


def store(data: bytes, path: Path, kernels: str) -> bool:
    """Write compiled kernels to the cache. If that fails, log a warning about `kernels` (a noun in plural), and return False."""
    try:
        write_atomically(data, path)
    except OSError as error:
        _warn(f"{kernels} are not cached in {path.parent}, but compiled at each start: {error}")
        return False
    return True


@cache
def _warn(message: str) -> None:
    """Log a warning once, since one start looks up many kernels."""
    _LOG.warning(message)


def _unsafe(path: Path, kind: int) -> str | None:
    """Return the reason not to trust a folder or file of the cache."""
    found = path.lstat()
    if stat.S_IFMT(found.st_mode) != kind:
        return f"{path} is a symbolic link or not a {'folder' if kind == stat.S_IFDIR else 'regular file'}"
    if found.st_uid != os.geteuid():
        return f"{path} belongs to the user {found.st_uid}, not to {os.geteuid()}"
    return f"others may write {path}" if found.st_mode & _OTHERS_WRITE else None


def _unsafe_above(path: Path) -> str | None:
    """Return the reason not to trust a folder above the cache."""
    found = path.stat()
    if found.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to the user {found.st_uid}, not to {os.geteuid()} or root"
    is_shared = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
    return f"everyone may write {path}" if is_shared else None
