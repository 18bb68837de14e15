"""Memory that host and device share, on a device that does nothing before the host waits for it."""

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


class LateDevice(CpuPlatform):
    """Work is put off until an event after it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[Callable[[], None]] = []

    def record_event(self) -> Event:
        return LateEvent(self, len(self.work))


class LateEvent:
    def __init__(self, device: LateDevice, place: int) -> None:
        self.device, self.place = device, place

    def synchronize(self) -> None:
        for index in range(self.place):
            self.device.work[index]()
            self.device.work[index] = lambda: None


@given(st.lists(st.tuples(st.integers(1, SIZE), st.integers(0, 3)), min_size=1, max_size=12))
def test_each_step_has_its_own_numbers_and_tokens(steps: list[tuple[int, int]]) -> None:
    """However far the host is ahead, and whenever, or never, it reads what steps leave: `steps` are (requests, reads)."""
    device, ops = LateDevice(), StepOps(torch.device("cpu"), torch.float32)
    exchange = ZeroCopyIO(device, 5, SIZE)
    inputs, last_tokens = torch.zeros(5, SIZE, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32)
    table = torch.zeros(ROWS, 20, dtype=torch.int32)
    seen: list[list[int]] = []
    unread: list[tuple[list[int], PendingTokens]] = []

    def step(number: int) -> None:
        known, _ = ops.decode_inputs(exchange.inputs, exchange.turn, inputs, last_tokens, table, 1)
        seen.append(inputs[4].tolist())
        ops.decode_outputs(known.long() * 10 + number, inputs[0], last_tokens, exchange.tokens, exchange.turn)

    for number, (count, num_reads) in enumerate(steps):
        place = exchange.begin()
        place[:] = 0
        place[0, :count] = range(1, count + 1)
        place[1, :count] = range(number, number + count)
        place[4] = number
        device.work.append(lambda number=number: step(number))  # type: ignore[misc]
        wanted = [(number + request) * 10 + number for request in range(count)]
        unread.append((wanted, exchange.launched(count)))
        for _ in range(min(num_reads, len(unread))):
            wanted, left = unread.pop()
            assert left.read().tolist() == wanted
            assert left.read() is left.read()
    for wanted, left in unread:
        assert left.read().tolist() == wanted
    assert seen == [[number] * SIZE for number in range(len(steps))]


def test_a_run_that_the_host_does_not_count() -> None:
    exchange = ZeroCopyIO(LateDevice(), 1, 1)
    exchange.turn.fill_(1)
    exchange.restart()
    assert exchange.turn.tolist() == [0]
