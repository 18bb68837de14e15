"""Signals to a launch of replicas on Ray, without a cluster."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from minisgl_server.ray import launch


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_a_call_to_the_cluster_stops_the_launch(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}

    signals = [number]

    def applications() -> list[str]:
        while signals:
            os.kill(os.getpid(), signals.pop())
        return ["engines"]

    monkeypatch.setattr(launch, "_applications", applications)
    monkeypatch.setattr(launch, "POLL_S", 0.1)
    try:
        launch._raise_on_signal()
        with pytest.raises(launch._StoppedError):
            launch._wait_replaced("engines")
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)


def test_an_unresponsive_head_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()

    def applications() -> list[str]:
        answered.wait()
        return ["engines"]

    monkeypatch.setattr(launch, "_applications", applications)
    monkeypatch.setattr(launch, "HEAD_S", 0.2)
    monkeypatch.setattr(launch, "POLL_S", 0.1)
    assert not launch._wait_replaced("engines")
    answered.set()
