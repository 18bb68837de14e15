"""The delay before a replica is restarted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minisgl_server.launch.restarts import MAX_DELAY_S, SERVED_S, Backoff


def test_delays_double_up_to_a_bound() -> None:
    backoff = Backoff()
    assert [backoff.delay_s(0) for _ in range(9)] == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert backoff.delay_s(SERVED_S) == 0
    assert backoff.delay_s(SERVED_S - 1) == 1


@given(st.lists(st.floats(0, 2 * SERVED_S), max_size=3000))
def test_delays_are_bounded_and_reset_by_service(served: list[float]) -> None:
    backoff, before_s = Backoff(), 0.0
    for index, served_s in enumerate(served):
        delay_s = backoff.delay_s(served_s)
        if index == 0 or served_s >= SERVED_S:
            assert delay_s == 0
        else:
            assert delay_s == min(max(1, 2 * before_s), MAX_DELAY_S)
        before_s = delay_s
