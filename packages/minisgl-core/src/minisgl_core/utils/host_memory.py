"""Free memory of the host, within the limit of the container."""

from contextlib import suppress
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
"""Folder of the cgroup (version 2) of a container. Its files are missing outside of containers."""


def available_memory() -> int:
    """Return the number of bytes that this process can still allocate."""
    free = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError, KeyError):  # ValueError: the limit is "max"
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        page_cache = int(stat["active_file"]) + int(stat["inactive_file"])  # the kernel frees it if memory is short
        free = min(free, max(1, limit - used + page_cache))
    return free
