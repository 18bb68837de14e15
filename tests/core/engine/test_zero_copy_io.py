"""Mapped pinned memory, on a device that runs nothing before the host waits for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given
from hypothesis import strategies as st

from minisgl_core.contracts.ops import StepOps
from minisgl_core.contracts.platform import Event
from minisgl_core.engine.zero_copy_io import PendingTokens, ZeroCopyIO
from minisgl_core.platforms.cpu import CpuPlatform

SIZE, ROWS = 4, 9


class LazyDevice(CpuPlatform):
    """Runs work only when the host waits for an event recorded after it."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[Callable[[], None]] = []

    def record_event(self) -> Event:
        return LazyEvent(self, len(self.work))


class LazyEvent:
    def __init__(self, device: LazyDevice, num_submitted: int) -> None:
        self.device, self.num_submitted = device, num_submitted

    def synchronize(self) -> None:
        for index in range(self.num_submitted):
            self.device.work[index]()
            self.device.work[index] = lambda: None


@given(st.lists(st.tuples(st.integers(1, SIZE), st.integers(0, 3)), min_size=1, max_size=12))
def test_steps_keep_inputs_and_tokens_while_the_host_is_ahead(steps: list[tuple[int, int]]) -> None:
    """`steps` are pairs of the number of requests, and the number of earlier results that the host reads after the launch."""
    device, ops = LazyDevice(), StepOps(torch.device("cpu"), torch.float32)
    io = ZeroCopyIO(device, 5, SIZE)
    inputs, last_tokens = torch.zeros(5, SIZE, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32)
    table = torch.zeros(ROWS, 20, dtype=torch.int32)
    seen: list[list[int]] = []
    unread: list[tuple[list[int], PendingTokens]] = []

    def step(number: int) -> None:
        known, _ = ops.decode_inputs(io.inputs, io.buffer_index, inputs, last_tokens, table, 1)
        seen.append(inputs[4].tolist())
        ops.decode_outputs(known.long() * 10 + number, inputs[0], last_tokens, io.tokens, io.buffer_index)

    for number, (count, num_reads) in enumerate(steps):
        buffer = io.begin()
        buffer[:] = 0
        buffer[0, :count] = range(1, count + 1)
        buffer[1, :count] = range(number, number + count)
        buffer[4] = number
        device.work.append(lambda number=number: step(number))  # type: ignore[misc]
        wanted = [(number + request) * 10 + number for request in range(count)]
        unread.append((wanted, io.launched(count)))
        for _ in range(min(num_reads, len(unread))):
            wanted, pending = unread.pop()
            assert pending.read().tolist() == wanted
            assert pending.read() is pending.read()
    for wanted, pending in unread:
        assert pending.read().tolist() == wanted
    assert seen == [[number] * SIZE for number in range(len(steps))]


def test_restart_resets_the_buffer_index_on_the_device() -> None:
    io = ZeroCopyIO(LazyDevice(), 1, 1)
    io.buffer_index.fill_(1)
    io.restart()
    assert io.buffer_index.tolist() == [0]
