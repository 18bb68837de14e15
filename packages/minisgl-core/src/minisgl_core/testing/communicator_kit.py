"""What every communicator must pass."""

from __future__ import annotations

import inspect
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
    """Subclass and set `provider`. Each rank is a process of its own.

    Attributes:
        provider: the class, at the top level of its file.
        sizes: sizes of the groups.
        device: of every rank; a ``{rank}`` in it is replaced, as in ``cuda:{rank}``.
        limit_s: how long the ranks may take altogether.
        raises_on_timeout: a collective that a rank does not join raises. Set to False where it ends the process.
    """

    provider: ClassVar[type[Communicator]]
    sizes: ClassVar[tuple[int, ...]] = (2, 4)
    device: ClassVar[str] = "cpu"
    limit_s: ClassVar[float] = 240.0
    raises_on_timeout: ClassVar[bool] = True

    def test_collectives(self) -> None:
        """Everything in `communicator_checks`, in groups of each size."""
        spec = CommunicatorSpec(0, max(self.sizes), torch.device(self.device.format(rank=0)), "file:///nowhere")
        reasons = self.provider.unsupported(spec)
        if reasons:
            pytest.skip("; ".join(reasons))
        errors = self.run_ranks()
        assert not errors, "\n".join(errors)

    def run_ranks(self) -> list[str]:
        """Run the checks with a process for each rank; returns what those that failed wrote."""
        name, file = self.provider.__qualname__, inspect.getfile(self.provider)
        sizes, with_faults = ",".join(map(str, self.sizes)), str(int(self.raises_on_timeout))
        with tempfile.TemporaryDirectory() as folder:
            ranks = []
            for rank in range(max(self.sizes)):
                arguments = [file, name, self.device.format(rank=rank), str(rank), sizes, folder, with_faults]
                log = Path(folder, f"rank {rank}")
                with log.open("wb") as output:
                    command = [sys.executable, "-m", communicator_checks.__name__, *arguments]
                    ranks.append((subprocess.Popen(command, stdout=output, stderr=output), log))
            deadline = time.monotonic() + self.limit_s
            try:
                failed = [log for process, log in ranks if _status(process, deadline) != 0]
            finally:
                for process, _ in ranks:
                    process.kill()
                    process.wait()
            return [f"{log.name} failed in {_check(log)}: {log.read_text()[-2000:]}" for log in failed]


def _status(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    """The exit status; None where the process still runs at the deadline."""
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _check(log: Path) -> str:
    """The check that a rank was in, which it notes before it begins; it may end without another word."""
    note = log.with_name(f"check of {log.name}")
    return note.read_text() if note.exists() else "its start"
