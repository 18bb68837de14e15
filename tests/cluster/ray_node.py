"""Ray clusters on this machine. A node may be on a test host, which is a network namespace with its own address."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time

import psutil

START_S = 120.0


class RayNode:
    """Node of a Ray cluster that `ray start` runs; `prefix` runs a command on its host."""

    def __init__(self, folder: str, head: str, address: str, num_cpus: int, prefix: tuple[str, ...]) -> None:
        self.address, self.prefix, self.head = address, prefix, head
        options = {
            "node-ip-address": address,
            "num-cpus": num_cpus,
            "object-store-memory": 80_000_000,
            "temp-dir": folder,  # each node has its own, as on separate hosts
        }
        if head.startswith(f"{address}:"):
            port = head.rpartition(":")[2]
            options |= {"head": None, "port": port, "include-dashboard": "false", "no-monitor": None}
        else:
            options["address"] = head
        flags = [word for key, value in options.items() for word in (f"--{key}", value) if word is not None]
        # its script may be in another folder
        ray = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]
        program = [*prefix, *ray, "start", "--block", "--disable-usage-stats"]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the node
        self.process = subprocess.Popen(
            [*program, *map(str, flags)], stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def wait_started(self) -> RayNode:
        deadline = time.monotonic() + START_S
        while "Ray runtime started" not in self.output():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.1)
        return self

    def output(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def processes(self, title: str = "") -> list[psutil.Process]:
        """Return the processes of the node whose command line contains `title`."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return processes_with_title(title, psutil.Process(self.process.pid).children(recursive=True))
        return []

    def stop(self) -> None:
        """Kill the node; repeated calls do nothing."""
        for each in (*self.processes(), self.process):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.wait()
        self.log.close()


def processes_with_title(title: str, processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes whose command line contains `title`."""
    found = []
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if title in " ".join(each.cmdline()):
                found.append(each)
    return found
