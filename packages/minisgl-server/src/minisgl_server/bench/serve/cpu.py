"""CPU time of a server's processes."""

import ipaddress
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress

import httpx
import psutil

from minisgl_server.bench.serve.http_client import port_of

TITLE = "minisgl: "
"""Prefix of the titles of minisgl's processes."""


class ServerCpuTimer:
    """User and system CPU time of a server's processes since this object was created."""

    def __init__(self, pids: Iterable[int]) -> None:
        """Start to measure the processes with these ids, and all their descendants."""
        self._before: dict[psutil.Process, tuple[str, float]] = {}
        for pid in pids:
            with suppress(psutil.Error):
                root = psutil.Process(pid)
                for process in (root, *root.children(recursive=True)):
                    self._before[process] = _name(process), sum(process.cpu_times()[:2])

    def seconds(self) -> dict[str, float]:
        """Return the CPU time by process name, summed over processes of equal name. Processes that have ended count as zero."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for process, (name, before_s) in self._before.items():
            seconds[name] += 0.0  # also if it has ended
            with suppress(psutil.Error):
                seconds[name] += sum(process.cpu_times()[:2]) - before_s
        return dict(seconds)


def local_server_pid(url: httpx.URL) -> int | None:
    """Return the launcher's process id of the minisgl server at a URL, or None if it cannot be found on this machine."""
    with suppress(ValueError, psutil.Error):
        if url.host != "localhost" and not ipaddress.ip_address(url.host).is_loopback:
            return None
        for each in psutil.net_connections("tcp"):
            if each.pid and each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port_of(url):
                process = psutil.Process(each.pid)
                if _name(process).partition(" ")[0] == "api" and (parent := process.parent()) is not None:
                    return parent.pid
    return None


def _name(process: psutil.Process) -> str:
    title = process.cmdline()[0] if process.cmdline() else process.name()
    return title.removeprefix(TITLE) if title.startswith(TITLE) else process.name()
