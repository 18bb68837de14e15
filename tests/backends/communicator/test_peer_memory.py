"""Allocation and release of peer memory, with a fake driver that records its calls; ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backends.communicator import oneshot, peer_memory, pynccl
from minisgl_backends.communicator.oneshot import OneShotCommunicator
from minisgl_backends.communicator.peer_memory import PeerMemory
from minisgl_backends.communicator.pynccl import NcclCommunicator
from minisgl_backends.communicator.rendezvous import Rendezvous
from minisgl_core.contracts.communicator import CommunicatorSpec
from minisgl_core.errors import ProviderUnsupportedError

CPU = torch.device("cpu")


class Driver:
    """Fake driver that records calls and fails at one of them.

    Attributes:
        calls: names of the calls, in order.
        broken: name of the call that fails.
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
    return CommunicatorSpec(rank, size, CPU, f"file://{folder}/rendezvous", timeout_s=30)


def on_ranks(size: int, folder: Path, live: Callable[[PeerMemory, int], None]) -> None:
    def run(rank: int) -> None:
        live(PeerMemory(Rendezvous(spec_of(rank, size, folder)), rank, CPU, 4, 0), rank)

    with ThreadPoolExecutor(size) as pool:
        for future in [pool.submit(run, rank) for rank in range(size)]:
            future.result()


def test_memory_is_freed_after_all_ranks_have_unmapped_it(driver: Driver, tmp_path: Path) -> None:
    on_ranks(3, tmp_path, lambda memory, rank: memory.close(30))
    endings = [name for name in driver.calls if name in ("cuIpcCloseMemHandle", "cuMemFree_v2")]
    assert endings == ["cuIpcCloseMemHandle"] * 6 + ["cuMemFree_v2"] * 3


def test_memory_is_freed_if_another_rank_never_unmaps_it(driver: Driver, tmp_path: Path) -> None:
    on_ranks(2, tmp_path, lambda memory, rank: memory.close(0.01) if rank == 0 else None)
    assert driver.calls.count("cuMemFree_v2") == 1


@pytest.mark.parametrize("broken", ["cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2"])
def test_without_cuda_ipc_the_error_names_another_communicator(broken: str, driver: Driver, tmp_path: Path) -> None:
    driver.broken = broken
    with pytest.raises(ProviderUnsupportedError, match=rf"{broken} failed: .*; use --communicator torch"):
        on_ranks(2, tmp_path, lambda memory, rank: None)
    assert driver.calls.count("cuMemFree_v2") == driver.calls.count("cuMemAlloc_v2")


def test_nccl_aborts_if_its_first_all_reduce_fails(driver: Driver, tmp_path: Path) -> None:
    driver.broken = "ncclAllReduce"
    with pytest.raises(RuntimeError, match="ncclAllReduce failed"):
        NcclCommunicator(spec_of(0, 1, tmp_path))
    assert driver.calls[-1] == "ncclCommAbort"


@pytest.mark.parametrize("broken", ["cuMemAlloc_v2", "the first all-reduce"])
def test_oneshot_aborts_and_frees_memory_if_its_start_fails(
    broken: str, driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")

    def fail(*args: Any) -> None:
        raise RuntimeError("the first all-reduce failed")

    driver.broken = broken
    monkeypatch.setattr(oneshot, "_NUM_BUFFERS", 0)
    monkeypatch.setattr(OneShotCommunicator, "one_shot_bytes", {1: 1024})
    monkeypatch.setattr(OneShotCommunicator, "all_reduce", fail)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *args, pin_memory=False, **kwargs: zeros(*args, **kwargs))
    with pytest.raises(RuntimeError, match=f"{broken} failed"):
        OneShotCommunicator(spec_of(0, 1, tmp_path))
    assert driver.calls.count("ncclCommAbort") == 1
    assert driver.calls.count("cuMemFree_v2") == (broken == "the first all-reduce")
