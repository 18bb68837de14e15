"""Signals to a launch of replicas on Ray, without a cluster."""

from __future__ import annotations

import os
import signal

import pytest

from minisgl_server.ray import launch


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_a_call_to_the_cluster_stops_the_launch(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}

    def applications() -> list[str]:
        os.kill(os.getpid(), number)
        return ["engines"]

    monkeypatch.setattr(launch, "_applications", applications)
    monkeypatch.setattr(launch, "POLL_S", 0)
    try:
        with pytest.raises(launch._StoppedError), launch._signals():
            launch._wait_replaced("engines")
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
