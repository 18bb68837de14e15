"""CPU time of a server's processes."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

import httpx
import psutil

from minisgl_server.bench.serve.http_client import port_of

TITLE = "minisgl: "
"""Prefix of the titles of minisgl's processes."""


class ServerCpuTimer:
    """User and system CPU time of a server's processes since this object was created."""

    def __init__(self, pids: Iterable[int]) -> None:
        """Start to measure the processes with these ids, and all their descendants."""
        self._processes: dict[int, tuple[str, psutil.Process]] = {}
        for pid in pids:
            try:
                root = psutil.Process(pid)
                for process in (root, *root.children(recursive=True)):
                    self._processes[process.pid] = (_name(process), process)
            except psutil.Error:
                continue
        self._before = self._read()

    def seconds(self) -> dict[str, float]:
        """Return the CPU time by process name, summed over processes of equal name. Processes that have ended count as zero."""
        seconds: dict[str, float] = {}
        now = self._read()
        for pid, (name, _) in self._processes.items():
            seconds[name] = seconds.get(name, 0.0) + now.get(pid, 0.0) - self._before.get(pid, 0.0)
        return {name: max(0.0, value) for name, value in seconds.items()}

    def _read(self) -> dict[int, float]:
        found = {}
        for pid, (_, process) in self._processes.items():
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            found[pid] = times.user + times.system
        return found


def frontend_cpu_s(by_process: dict[str, float]) -> float | None:
    """Return the CPU time of minisgl's API server and tokenizer workers together, or None if there are none."""
    found = [seconds for name, seconds in by_process.items() if name.partition(" ")[0] in ("api", "tokenizer")]
    return sum(found) if found else None


def local_server_pid(url: httpx.URL) -> int | None:
    """Return the launcher's process id of the minisgl server at a URL, or None if it cannot be found on this machine."""
    try:
        is_local = url.host == "localhost" or ipaddress.ip_address(url.host).is_loopback
    except ValueError:
        return None
    if not is_local:
        return None
    try:
        listeners = [
            each.pid
            for each in psutil.net_connections("tcp")
            if each.pid and each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port_of(url)
        ]
        for pid in listeners:
            process = psutil.Process(pid)
            if _name(process).partition(" ")[0] == "api" and (parent := process.parent()) is not None:
                return parent.pid
    except psutil.Error:
        pass
    return None


def _name(process: psutil.Process) -> str:
    title = process.cmdline()[0] if process.cmdline() else process.name()
    return title.removeprefix(TITLE) if title.startswith(TITLE) else process.name()
