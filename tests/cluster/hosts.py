"""Test hosts on this machine: network namespaces on a bridge, which this process reaches too. They need root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from types import TracebackType
from typing import Self

import psutil


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Hosts:
    """Hosts with the addresses 10.x.0.1, 10.x.0.2, ...; the names and x differ between test processes.

    Files and processors are shared.
    """

    def __init__(self, num: int) -> None:
        self._bridge, self._net = f"mb{os.getpid()}", f"10.{64 + os.getpid() % 128}.0"
        self._names = [f"mh{os.getpid()}-{number}" for number in range(1, num + 1)]
        self.addresses = [f"{self._net}.{number}" for number in range(1, num + 1)]

    @staticmethod
    def unsupported() -> str:
        """The reason why this process cannot make hosts; empty if it can."""
        if shutil.which("ip") is None:
            return "test hosts need iproute2"
        name = f"mt{os.getpid()}"
        if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
            return "test hosts need the right to make network namespaces"
        ip("netns", "del", name)
        return ""

    def on(self, index: int) -> tuple[str, ...]:
        """Beginning of a command that runs on a host."""
        return ("ip", "netns", "exec", self._names[index])

    def processes(self, index: int) -> list[psutil.Process]:
        """Processes on a host."""
        listed = subprocess.run(["ip", "netns", "pids", self._names[index]], capture_output=True, text=True, check=True)
        found = []
        for pid in map(int, listed.stdout.split()):
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
        return found

    def cut(self, index: int) -> None:
        """Unplug a host's cable."""
        ip("link", "set", self._cable(index), "down")

    def join(self, index: int) -> None:
        """Plug it in again."""
        ip("link", "set", self._cable(index), "up")

    def _cable(self, index: int) -> str:
        return f"mv{os.getpid()}-{index}"

    def __enter__(self) -> Self:
        try:
            ip("link", "add", self._bridge, "type", "bridge")
            ip("addr", "add", f"{self._net}.254/24", "dev", self._bridge)
            ip("link", "set", self._bridge, "up")
            for index, (name, address) in enumerate(zip(self._names, self.addresses, strict=True)):
                ip("netns", "add", name)
                ip("link", "add", self._cable(index), "type", "veth", "peer", "name", "eth0", "netns", name)
                ip("link", "set", self._cable(index), "master", self._bridge, "up")
                ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True)
