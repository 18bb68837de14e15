"""``minisgl launch`` on a host of a Ray cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from tempfile import TemporaryFile

import psutil
from ray_node import RayNode

DEADLINE_S = 90.0


class Launched:
    """Process of the launch on `node`; `banner` has its output up to "Serving at"."""

    def __init__(self, node: RayNode, *flags: str) -> None:
        self.node, self.banner = node, ""
        program = [*node.prefix, sys.executable, "-c", "from minisgl_core.cli.main import main; main()", "launch"]
        fixed = "--executor ray --port 0 --platform cpu --dtype float32"
        environ = {**os.environ, "RAY_ADDRESS": node.head, "OMP_NUM_THREADS": "1"}
        self.errors = TemporaryFile("w+")  # noqa: SIM115  # closed with the launch
        self.process = subprocess.Popen(
            [*program, *fixed.split(), *flags], env=environ, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )

    def read_banner(self, last: str) -> None:
        """Read the output up to a line that begins with `last`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.banner += line
            if line.startswith(last):
                break
        assert "Serving at" in self.banner, (self.process.wait(), self.stderr())

    def stderr(self) -> str:
        self.errors.seek(0)
        return self.errors.read()

    def processes(self, *nodes: RayNode) -> list[psutil.Process]:
        """Return the processes of the launch, with its ranks and their actors on the nodes."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        for node in nodes:
            found += [*node.processes("minisgl"), *node.processes("RankActor")]
        return found

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(DEADLINE_S)
        self.process.stdout.close()  # type: ignore[union-attr]
        self.errors.close()
