"""Conformance kit of communicators."""

import inspect
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch.multiprocessing.spawn import ProcessException, start_processes

from minisgl_core.contracts.communicator import Communicator, CommunicatorSpec
from minisgl_core.testing import communicator_checks
from minisgl_core.testing.reasons import skip_if_unsupported


class CommunicatorTests:
    """Tests of a communicator. Subclass this and set `provider`. Each rank runs in its own process.

    Attributes:
        provider: communicator class, defined at module level so that each rank's process can load it by name.
        sizes: sizes of the groups.
        device: device of each rank; ``{rank}`` is replaced, as in ``cuda:{rank}``.
        limit_s: time limit of the ranks of a group.
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
        for size in self.sizes:
            # The checks that wait for timeouts run in the largest group only.
            self.run_ranks(size, with_faults=self.raises_on_timeout and size == max(self.sizes))

    def run_ranks(self, size: int, with_faults: bool) -> None:
        """Run the checks with one process per rank. The fork server imports torch once for all of them."""
        get_context("forkserver").set_forkserver_preload([communicator_checks.__name__])
        provider = inspect.getfile(self.provider), self.provider.__qualname__
        with tempfile.TemporaryDirectory() as folder:
            arguments = (*provider, self.device, size, folder, with_faults)
            ranks = start_processes(  # type: ignore[no-untyped-call]
                communicator_checks.run_rank, arguments, size, join=False, daemon=True, start_method="forkserver"
            )
            deadline = time.monotonic() + self.limit_s
            try:
                while not ranks.join(max(0.0, deadline - time.monotonic())):
                    if time.monotonic() >= deadline:
                        checks = ", ".join(file.read_text() for file in Path(folder).glob("check of *"))
                        pytest.fail(f"{size} ranks did not end in {self.limit_s} s; checks: {checks or 'none began'}")
            except ProcessException as error:
                note = Path(folder, f"check of rank {error.error_index}")
                check = note.read_text() if note.exists() else "its start"
                pytest.fail(f"rank {error.error_index} of {size} failed in {check}: {error}")
            finally:
                for process in ranks.processes:
                    process.kill()
