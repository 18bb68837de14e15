"""Messages and placement groups of the executor ray, without Ray."""

from __future__ import annotations

import sys
import threading
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from minisgl_backends.executor.ray_executor import ACTOR_TIMEOUT_S, LOST_TIMEOUT_S, RayExecutor, summarize
from minisgl_core.contracts.executor import ExecutorSpec
from minisgl_core.errors import WorkerDiedError

LACKS_PACKAGES = """\x1b[36mray::RankActor.reserve()\x1b[39m (pid=71, ip=10.0.0.2, actor_id=a, repr=<TemporaryActor>)
RuntimeError: The actor with name RankActor failed to import on the worker:

\x1b[36mray::RankActor.reserve()\x1b[39m (pid=71, ip=10.0.0.2, actor_id=a, repr=<TemporaryActor>)
    from minisgl_backends.executor.rank_actor import RankActor
ModuleNotFoundError: No module named 'minisgl_backends'"""


@pytest.mark.parametrize(
    ("text", "summary"),
    [
        (LACKS_PACKAGES, "ModuleNotFoundError: No module named 'minisgl_backends' (on 10.0.0.2)"),
        (f"The actor died because of its creation task, {LACKS_PACKAGES}", "(on 10.0.0.2)"),
        ("The actor died unexpectedly.\n\tclass_name: RankActor\nIts node died.", "The actor died unexpectedly."),
        ("", "RuntimeError"),
    ],
)
def test_errors_of_ray_are_summarized_in_one_line(text: str, summary: str) -> None:
    assert summary in summarize(RuntimeError(text))
    assert "\x1b" not in summarize(RuntimeError(text))


@pytest.mark.parametrize(
    ("placement", "num_cpus", "strategy"),
    [("pack", [2, 2, 2], "PACK"), ("spread", [1] * 6, "SPREAD"), ("strict-spread", [1] * 6, "STRICT_SPREAD")],
)
def test_bundles_are_stages_with_pack_and_ranks_otherwise(placement: str, num_cpus: list[int], strategy: str) -> None:
    spec = ExecutorSpec(tp=2, pp=3, placement=placement, platform="cpu")
    assert RayExecutor.bundles(spec, {"GPU": 8}) == ([{"CPU": num} for num in num_cpus], strategy)


@pytest.mark.parametrize(
    ("platform", "num_gpus", "needs_gpus"),
    [("auto", 3, False), ("auto", 4, True), ("cuda", 0, True), ("cpu", 4, False)],
)
def test_ranks_need_gpus_if_the_platform_or_the_cluster_has_them(
    platform: str, num_gpus: int, needs_gpus: bool
) -> None:
    bundles, _ = RayExecutor.bundles(ExecutorSpec(tp=4, platform=platform), {"CPU": 64, "GPU": num_gpus})
    assert bundles == [{"CPU": 4, "GPU": 4} if needs_gpus else {"CPU": 4}]


@pytest.mark.parametrize(("hangs", "limit_s"), [("start", ACTOR_TIMEOUT_S), ("poll", LOST_TIMEOUT_S)])
def test_unresponsive_nodes_are_lost_after_the_calls_timeout(
    monkeypatch: pytest.MonkeyPatch, hangs: str, limit_s: float
) -> None:
    """The error names the timeout of that call."""

    class FakeRayError(Exception):
        pass

    class FakeTimeoutError(FakeRayError):
        pass

    def get(call: str, timeout: float) -> None:
        if call == hangs:
            assert timeout == limit_s
            raise FakeTimeoutError

    exceptions = SimpleNamespace(GetTimeoutError=FakeTimeoutError, RayError=FakeRayError)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=get, exceptions=exceptions))
    executor: Any = RayExecutor.__new__(RayExecutor)
    executor._actors = [SimpleNamespace(poll=SimpleNamespace(remote=lambda: "poll"))]
    executor._reserved = [SimpleNamespace(address="10.0.0.2")]
    executor._closing = threading.Event()
    executor._has_lost_head = lambda: False
    events, sent = Pipe()
    executor._forward("rank 1", 0, "start", sent)
    error = events.recv()
    assert isinstance(error, WorkerDiedError)
    assert f"its node 10.0.0.2 has not answered for {limit_s:g} s" in str(error)
