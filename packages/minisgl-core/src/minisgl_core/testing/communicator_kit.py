"""Conformance kit of communicators."""

import inspect
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import torch

from minisgl_core.contracts.communicator import Communicator, CommunicatorSpec
from minisgl_core.testing import communicator_checks
from minisgl_core.testing.reasons import skip_if_unsupported


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
        skip_if_unsupported(self.provider, spec)
        errors = self.run_ranks()
        assert not errors, "\n".join(errors)

    def run_ranks(self) -> list[str]:
        """Run the checks with one process per rank, and return the output of those that failed."""
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max(self.sizes)) as pool:
            outputs = pool.map(lambda rank: self._run_rank(rank, folder), range(max(self.sizes)))
            return [output for output in outputs if output]

    def _run_rank(self, rank: int, folder: str) -> str:
        """Run a rank's process, and return its output if it failed; otherwise return an empty text."""
        name, file = self.provider.__qualname__, inspect.getfile(self.provider)
        sizes, with_faults = ",".join(map(str, self.sizes)), str(int(self.raises_on_timeout))
        arguments = [file, name, self.device.format(rank=rank), str(rank), sizes, folder, with_faults]
        command = [sys.executable, "-m", communicator_checks.__name__, *arguments]
        # The provider's file may import modules that only pytest's settings make importable.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        output = Path(folder, f"output of rank {rank}")
        try:
            with output.open("wb") as stream:
                subprocess.run(command, stdout=stream, stderr=stream, env=environment, timeout=self.limit_s, check=True)
            return ""
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            # The rank writes the name of a check to this file before it runs it, as the check may end the process.
            note = Path(folder, f"check of rank {rank}")
            check = note.read_text() if note.exists() else "its start"
            return f"rank {rank} failed in {check}: {output.read_text()[-2000:]}"
