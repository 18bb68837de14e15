"""Test hosts: network namespaces on a bridge of this host. They need root and iproute2.

``python hosts.py`` prints the reason if this machine does not support them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from types import TracebackType
from typing import Self


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Hosts:
    """This host and test hosts with the addresses 10.x.0.1, 10.x.0.2, ...

    Names and x differ between test processes. Files and processors are shared.

    Args:
        num: number of hosts; the first one is this host.
    """

    def __init__(self, num: int) -> None:
        self._bridge, self._net = f"mb{os.getpid()}", f"10.{64 + os.getpid() % 128}.0"
        self.addresses = [f"{self._net}.{number}" for number in range(1, num + 1)]

    @staticmethod
    def unsupported() -> str:
        """Return why this process cannot create hosts; empty if it can."""
        if shutil.which("ip") is None:
            return "test hosts need iproute2"
        try:
            with Hosts(2):
                return ""
        except subprocess.CalledProcessError as error:
            return f"this user cannot make test hosts: {error.stderr.strip()}"

    def on(self, index: int) -> tuple[str, ...]:
        """Return the prefix of a command that runs on a host."""
        return ("ip", "netns", "exec", self._name(index)) if index else ()

    def cut(self, index: int) -> None:
        """Disconnect a test host from the network."""
        ip("link", "set", self._cable(index), "down")

    def join(self, index: int) -> None:
        """Connect a test host again."""
        ip("link", "set", self._cable(index), "up")

    @staticmethod
    def _cable(index: int) -> str:
        return f"mv{os.getpid()}-{index}"

    @staticmethod
    def _name(index: int) -> str:
        return f"mh{os.getpid()}-{index}"

    def __enter__(self) -> Self:
        try:
            ip("link", "add", self._bridge, "type", "bridge")
            ip("addr", "add", f"{self.addresses[0]}/24", "dev", self._bridge)
            ip("link", "set", self._bridge, "up")
            for index, address in enumerate(self.addresses[1:], 1):
                name, cable = self._name(index), self._cable(index)
                ip("netns", "add", name)
                ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
                ip("link", "set", cable, "master", self._bridge, "up")
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
        for index in range(1, len(self.addresses)):
            # The cable first: closing connections would keep a namespace for a minute.
            subprocess.run(["ip", "link", "del", self._cable(index)], capture_output=True)
            subprocess.run(["ip", "netns", "del", self._name(index)], capture_output=True)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True)


if __name__ == "__main__":
    print(Hosts.unsupported())
