"""Ray clusters on this machine. A node may be on a test host, which is a network namespace with an address of its own."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

START_S = 120.0


class RayNode:
    """A node of a Ray cluster that `ray start` runs; `prefix` is what runs a command on its host."""

    def __init__(
        self, folder: str, head: str, address: str, *, prefix: tuple[str, ...] = (), num_cpus: int = 4
    ) -> None:
        self.address, self.prefix, self.head = address, prefix, head
        is_head = head.startswith(f"{address}:")
        # Each has its own folder, as on hosts with disks of their own.
        mine = ["--head", "--port", head.rpartition(":")[2]] if is_head else ["--address", head]
        options = {
            "node-ip-address": address,
            "num-cpus": num_cpus,
            "object-store-memory": 80_000_000,
            "temp-dir": folder,
        }
        flags = [text for key, value in options.items() for text in (f"--{key}", str(value))]
        if is_head:
            flags += ["--include-dashboard", "false"]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the node
        self.process = subprocess.Popen(
            [
                *prefix,
                Path(sys.executable).with_name("ray"),
                "start",
                "--block",
                "--disable-usage-stats",
                *mine,
                *flags,
            ],
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
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

    def processes(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def stop(self) -> None:
        """End the node, at first as `ray stop` would."""
        running = self.processes()
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        for each in psutil.wait_procs(running, 5)[1]:
            each.kill()
        self.process.kill()
        self.process.wait()
        self.log.close()
