"""The life of memory that ranks share, on a driver that only notes what is asked of it; ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backends.communicator import oneshot, peer_memory, pynccl
from minisgl_backends.communicator.meeting import Meeting
from minisgl_backends.communicator.oneshot import OneShotCommunicator
from minisgl_backends.communicator.peer_memory import PeerMemory
from minisgl_backends.communicator.pynccl import NcclCommunicator
from minisgl_core.contracts.communicator import CommunicatorSpec
from minisgl_core.errors import ProviderUnsupportedError

CPU = torch.device("cpu")


class Driver:
    """Notes the calls, and fails at one of them.

    Attributes:
        calls: names, in order.
        broken: the call that fails.
    """

    version = "0"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.broken = ""

    def call(self, name: str, *arguments: Any) -> None:
        self.calls.append(name)
        if name == self.broken:
            raise RuntimeError(f"{name} failed: operation not supported")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    class Stream:
        cuda_stream = 0

        def synchronize(self) -> None:
            pass

    driver = Driver()
    monkeypatch.setattr(peer_memory, "call", driver.call)
    monkeypatch.setattr(pynccl, "load_nccl", lambda: driver)
    for name in ("synchronize", "set_device"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    return driver


def spec_of(rank: int, size: int, folder: Path) -> CommunicatorSpec:
    return CommunicatorSpec(rank, size, CPU, f"file://{folder}/meeting", timeout_s=30)


def on_ranks(size: int, folder: Path, live: Callable[[PeerMemory, int], None]) -> None:
    def run(rank: int) -> None:
        live(PeerMemory(Meeting(spec_of(rank, size, folder)), rank, CPU, 4, 0), rank)

    with ThreadPoolExecutor(size) as pool:
        for future in [pool.submit(run, rank) for rank in range(size)]:
            future.result()


def test_memory_is_freed_once_nobody_has_it_any_more(driver: Driver, tmp_path: Path) -> None:
    on_ranks(3, tmp_path, lambda memory, rank: memory.close(30))
    endings = [name for name in driver.calls if name in ("cuIpcCloseMemHandle", "cuMemFree_v2")]
    assert endings == ["cuIpcCloseMemHandle"] * 6 + ["cuMemFree_v2"] * 3


def test_memory_is_freed_where_another_rank_never_lets_go(driver: Driver, tmp_path: Path) -> None:
    on_ranks(2, tmp_path, lambda memory, rank: memory.close(0.01) if rank == 0 else None)
    assert driver.calls.count("cuMemFree_v2") == 1


@pytest.mark.parametrize("broken", ["cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2"])
def test_where_processes_share_no_memory_another_communicator_is_named(
    broken: str, driver: Driver, tmp_path: Path
) -> None:
    driver.broken = broken
    with pytest.raises(ProviderUnsupportedError, match=rf"{broken} failed: .*; use --communicator torch"):
        on_ranks(2, tmp_path, lambda memory, rank: None)
    assert driver.calls.count("cuMemFree_v2") == driver.calls.count("cuMemAlloc_v2")


def test_nccl_leaves_a_group_whose_first_sum_fails(driver: Driver, tmp_path: Path) -> None:
    driver.broken = "ncclAllReduce"
    with pytest.raises(RuntimeError, match="ncclAllReduce failed"):
        NcclCommunicator(spec_of(0, 1, tmp_path))
    assert driver.calls[-1] == "ncclCommAbort"


@pytest.mark.parametrize("broken", ["cuMemAlloc_v2", "the first sum"])
def test_oneshot_leaves_what_it_joined_where_it_cannot_go_on(
    broken: str, driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")

    def fail(*args: Any) -> None:
        raise RuntimeError("the first sum failed")

    driver.broken = broken
    monkeypatch.setattr(oneshot, "_NUM_TURNS", 0)
    monkeypatch.setattr(OneShotCommunicator, "one_shot_bytes", {1: 1024})
    monkeypatch.setattr(OneShotCommunicator, "all_reduce", fail)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *args, pin_memory=False, **kwargs: zeros(*args, **kwargs))
    with pytest.raises(RuntimeError, match=f"{broken} failed"):
        OneShotCommunicator(spec_of(0, 1, tmp_path))
    assert driver.calls.count("ncclCommAbort") == 1
    assert driver.calls.count("cuMemFree_v2") == (broken == "the first sum")
