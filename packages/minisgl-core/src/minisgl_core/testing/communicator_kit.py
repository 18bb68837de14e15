"""Conformance kit of communicators."""

import inspect
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from minisgl_core.contracts.communicator import Communicator, CommunicatorSpec
from minisgl_core.testing import communicator_checks


class CommunicatorTests:
    """Tests of a communicator. Subclass this and set `provider`. Each rank runs in its own process.

    Attributes:
        provider: communicator class, defined at module level so that each rank's process can load it by name.
        sizes: sizes of the groups.
        device: device of each rank; ``{rank}`` is replaced, as in ``cuda:{rank}``.
        limit_s: time limit of all ranks together.
        raises_on_timeout: True if a collective that a rank does not join raises; False if it ends the process.
    """

    provider: ClassVar[type[Communicator]]
    sizes: ClassVar[tuple[int, ...]] = (2, 4)
    device: ClassVar[str] = "cpu"
    limit_s: ClassVar[float] = 240.0
    raises_on_timeout: ClassVar[bool] = True

    def test_collectives(self) -> None:
        """All checks of `communicator_checks` pass, in groups of each size."""
        spec = CommunicatorSpec(0, max(self.sizes), torch.device(self.device.format(rank=0)), "file:///nowhere")
        reasons = self.provider.unsupported(spec)
        if reasons:
            pytest.skip("; ".join(reasons))
        errors = self.run_ranks()
        assert not errors, "\n".join(errors)

    def run_ranks(self) -> list[str]:
        """Run the checks with one process per rank, and return the output of those that failed."""
        name, file = self.provider.__qualname__, inspect.getfile(self.provider)
        sizes, with_faults = ",".join(map(str, self.sizes)), str(int(self.raises_on_timeout))
        # The provider's file may import modules that only pytest's settings make importable.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        with tempfile.TemporaryDirectory() as folder:
            ranks = []
            for rank in range(max(self.sizes)):
                arguments = [file, name, self.device.format(rank=rank), str(rank), sizes, folder, with_faults]
                log = Path(folder, f"rank {rank}")
                with log.open("wb") as output:
                    command = [sys.executable, "-m", communicator_checks.__name__, *arguments]
                    ranks.append((subprocess.Popen(command, stdout=output, stderr=output, env=environment), log))
            deadline = time.monotonic() + self.limit_s
            try:
                failed = [log for process, log in ranks if _status(process, deadline) != 0]
            finally:
                for process, _ in ranks:
                    process.kill()
                    process.wait()
            return [f"{log.name} failed in {_check(log)}: {log.read_text()[-2000:]}" for log in failed]


def _status(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    """Return the exit status; None if the process still runs at the deadline."""
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _check(log: Path) -> str:
    """Return the check that a rank ran last. The rank writes its name to a file before, as the check may end the process."""
    note = log.with_name(f"check of {log.name}")
    return note.read_text() if note.exists() else "its start"
