"""The router's process without sockets: loads, lost replicas, counts, and events of a real cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_backends.prefix_cache.radix import RadixPrefixCache
from minisgl_core.contracts.prefix_cache import DEFAULT_NAMESPACE
from minisgl_core.contracts.router import RouterSpec, block_keys
from minisgl_core.errors import PluginError
from minisgl_core.protocol.engine_snapshot import SnapshotRequest
from minisgl_core.protocol.messages import (
    Abort,
    CacheEvents,
    Ended,
    EngineInfo,
    NoReplica,
    NoSnapshot,
    Rejected,
    ReplicaDied,
    ReplicaLost,
    ReplicaReady,
    RequestCounts,
    Submit,
)
from minisgl_core.runtime.ipc import IpcAddresses, Receiver
from minisgl_core.sampling_params import SamplingParams
from minisgl_server.router.cache_events import CacheEventHooks
from minisgl_server.router.prefix import PrefixRouter
from minisgl_server.router.worker import RouterWorker


def info(**options: Any) -> EngineInfo:
    return EngineInfo(
        model="m",
        architecture="a",
        dtype="float32",
        device="cpu",
        max_seq_len=64,
        vocab_size=10,
        num_pages=64,
        page_size=8,
        eos_token_ids=[0],
        bos_token_id=None,
        default_sampling={},
        choices=[],
        max_requests=8,
        **options,
    )


class Rig:
    """Router of two replicas and two tokenizer workers, which are lists."""

    def __init__(self) -> None:
        self.engines: dict[int, list[Any]] = {}
        self.workers: list[list[Any]] = [[], []]
        sends = [worker.append for worker in self.workers]
        self.router = PrefixRouter(RouterSpec(2, 256))
        self.worker = RouterWorker(self.router, info(), self.connect, sends)

    def connect(self, engine: int) -> Any:
        self.engines[engine] = []
        return self.engines[engine].append

    def send(self, *messages: Any) -> None:
        for message in messages:
            self.worker.handle(message)

    def submit(self, name: str, tokens: Any = (1,) * 40, worker: int = 0) -> None:
        self.send(
            Submit(request_id=name, token_ids=np.array(tokens, np.int32), sampling=SamplingParams(), worker=worker)
        )

    def loads(self) -> list[tuple[int, int]]:
        return [(each.num_requests, each.num_prompt_tokens) for each in self.worker.replicas]

    def names(self, engine: int) -> list[str]:
        return [message.request_id for message in self.engines[engine]]


@pytest.fixture
def rig() -> Rig:
    rig = Rig()
    rig.send(ReplicaReady(0, 0), ReplicaReady(1, 1))
    return rig


def test_loads_follow_submitted_and_finished_requests(rig: Rig) -> None:
    rig.submit("a", [1] * 40)
    rig.submit("b", [2] * 30)
    rig.submit("c", [1] * 50)
    assert (rig.names(0), rig.names(1)) == (["a", "c"], ["b"])
    assert rig.loads() == [(2, 90), (1, 30)]
    rig.send(Ended(["a", "unknown"]), Abort("b"), Abort("unknown"))
    assert rig.engines[1][-1] == Abort("b")
    assert rig.loads() == [(1, 50), (0, 0)]
    rig.send(Ended(["a", "b", "c"]))
    assert rig.loads() == [(0, 0), (0, 0)]


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "submit", "abort", "ended", "died", "ready"]),
        st.integers(0, 9),
        st.integers(1, 60),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(CALLS)
def test_loads_equal_those_of_a_naive_reference(calls: list[tuple[str, int, int]]) -> None:
    """The reference keeps the replica of each request, over submissions, ends and lost replicas in any order."""
    rig, engines, lengths, num_seen = Rig(), [0, 1], dict[str, int](), 0
    at: dict[str, int] = {}
    ready = [False, False]

    def look() -> None:
        for engine, sent in rig.engines.items():
            for message in sent:
                if isinstance(message, Submit):
                    at[message.request_id] = engine % 2
            sent.clear()

    for call, number, num_tokens in calls:
        replica = number % 2
        live = sorted(lengths)
        if call == "submit":
            num_seen += 1
            lengths[str(num_seen)] = num_tokens
            rig.submit(str(num_seen), [number] * num_tokens)
        elif call == "abort" and live:
            name = live[number % len(live)]
            del lengths[name]
            at.pop(name, None)
            rig.send(Abort(name))
        elif call == "ended" and (running := sorted(at)):
            name = running[number % len(running)]
            del lengths[name], at[name]
            rig.send(Ended([name]))
        elif call == "died" and ready[replica]:
            ready[replica] = False
            for name in [name for name, place in at.items() if place == replica]:
                del lengths[name], at[name]
            rig.send(ReplicaDied(replica, engines[replica]))
            engines[replica] += 2
        elif call == "ready" and not ready[replica]:
            ready[replica] = True
            rig.send(ReplicaReady(replica, engines[replica]))
        look()
        for rejected in [each for sent in rig.workers for each in sent if isinstance(each, Rejected)]:
            lengths.pop(rejected.request_id, None)
        own = [[lengths[name] for name, place in at.items() if place == each] for each in (0, 1)]
        assert rig.loads() == [(len(each), sum(each)) for each in own]
        assert any(ready) or not at


def test_tokenizer_workers_get_the_requests_of_lost_replicas(rig: Rig) -> None:
    rig.submit("a", [1] * 40)
    rig.submit("b", [1] * 40, worker=1)
    rig.submit("c", [2] * 40)
    rig.send(ReplicaDied(0, 0))
    assert rig.workers == [[ReplicaLost(0, ["a"])], [ReplicaLost(0, ["b"])]]
    rig.submit("a", [1] * 40)
    assert rig.names(1) == ["c", "a"]
    rig.send(ReplicaReady(0, 2))
    rig.send(Ended(["c", "a"]))
    rig.send(
        CacheEvents(0, block_keys(np.full(40, 9, np.int32), 16), np.empty(0, np.uint64))
    )  # of the engine that has ended
    rig.submit("d", [1] * 40)
    assert rig.names(1)[-1] == "d", "the new engine of replica 0 holds nothing"
    assert rig.engines[0][2:] == [], "nothing is sent to an engine that has ended"
    assert not rig.router._table.num_held(rig.router._table.find(block_keys(np.full(40, 9, np.int32), 16))).any()


def test_requests_wait_while_no_replica_is_ready() -> None:
    rig = Rig()
    for name in "abc":
        rig.submit(name)
    rig.send(Abort("b"), ReplicaReady(1, 1))
    assert rig.names(1) == ["a", "c"]
    rig.send(ReplicaDied(1, 1))
    rig.submit("d")
    rig.send(ReplicaReady(1, 3))
    assert rig.names(3) == ["d"]


def test_no_request_waits_while_all_replicas_fail() -> None:
    rig = Rig()
    rig.submit("a", worker=1)
    rig.send(NoReplica(4))
    rig.submit("b")
    assert [[(each.request_id, each.kind) for each in sent] for sent in rig.workers] == [
        [("b", "no_replica")],
        [("a", "no_replica")],
    ]
    rig.send(ReplicaReady(1, 1), ReplicaDied(1, 1))
    rig.submit("c")
    rig.send(ReplicaReady(0, 0))
    assert rig.names(0) == ["c"], "one failure more does not refuse it"


def test_the_number_of_waiting_requests_is_limited() -> None:
    rig = Rig()
    for number in range(10):
        rig.submit(str(number), worker=1)
    refused = rig.workers[1]
    assert all(isinstance(each, Rejected) and each.kind == "queue_full" for each in refused)
    assert [each.request_id for each in refused] == ["8", "9"], "EngineInfo.max_requests is 8"
    rig.send(Abort("3"))
    rig.submit("10", worker=1)
    rig.send(ReplicaReady(0, 0), ReplicaReady(1, 1))
    assert (rig.names(0), rig.names(1)) == (["0", "1", "2", "4"], ["5", "6", "7", "10"])


def test_a_count_is_summed_even_if_a_replica_dies(rig: Rig) -> None:
    rig.submit("a")
    for dies in (False, True):
        rig.send(RequestCounts(worker=1, counts={"tokenizer 1": 4}))
        first, second = (rig.engines[engine][-1] for engine in (0, 1))
        assert first.worker == second.worker == 2, "replicas answer to the router"
        rig.send(RequestCounts(worker=2, correlation_id=first.correlation_id, counts={"running": 1, "waiting": 2}))
        assert not any(isinstance(each, RequestCounts) for each in rig.workers[1])
        if dies:
            rig.send(ReplicaDied(1, 1))
        else:
            rig.send(RequestCounts(worker=2, correlation_id=second.correlation_id, counts={"running": 3, "waiting": 0}))
        [answer] = [each for each in rig.workers[1] if isinstance(each, RequestCounts)]
        rig.workers[1].clear()
        running, waiting = (1, 2) if dies else (4, 2)
        assert answer.counts == {"tokenizer 1": 4, "router": 1, "running": running, "waiting": waiting}
    rig.send(RequestCounts(worker=2, correlation_id=second.correlation_id, counts={"running": 3}))  # too late


def test_snapshots_come_from_a_ready_replica(rig: Rig) -> None:
    rig.send(SnapshotRequest(worker=0, replica=1))
    assert rig.engines[1][-1].replicas[1].is_ready
    rig.send(ReplicaDied(1, 1), SnapshotRequest(worker=0, replica=1))
    assert [each.is_ready for each in rig.engines[0][-1].replicas] == [True, False]


def test_snapshots_fail_if_no_replica_is_ready(rig: Rig) -> None:
    rig.send(
        SnapshotRequest(worker=1, correlation_id=1, replica=1), SnapshotRequest(worker=1, correlation_id=2, replica=0)
    )
    for engine in (1, 0):  # each replica dies before it answers
        rig.engines[1 - engine].clear()
        rig.send(ReplicaDied(engine, engine))
        correlation_ids = [each.correlation_id for each in rig.engines[1 - engine] if isinstance(each, SnapshotRequest)]
        assert correlation_ids == ([1] if engine else [])
    answers = [each for each in rig.workers[1] if isinstance(each, NoSnapshot)]
    assert sorted(each.correlation_id for each in answers) == [1, 2]
    rig.send(SnapshotRequest(worker=0, correlation_id=3))
    assert rig.workers[0][-1] == NoSnapshot(3)


def test_snapshots_are_requested_again_if_the_replica_dies(rig: Rig) -> None:
    rig.send(
        SnapshotRequest(worker=0, correlation_id=1, replica=1), SnapshotRequest(worker=1, correlation_id=1, replica=1)
    )
    rig.send(ReplicaDied(1, 1))
    assert [each.worker for each in rig.engines[0] if isinstance(each, SnapshotRequest)] == [0, 1]


def test_requests_avoid_a_full_replica_while_another_has_room(rig: Rig) -> None:
    """Each replica accepts 4 requests, and the cache of replica 0 has the prefix of all."""
    for number in range(8):
        rig.submit(str(number))
    assert (rig.names(0), rig.names(1)) == (["0", "1", "2", "3"], ["4", "5", "6", "7"])
    rig.submit("8")
    assert "8" in rig.names(0) + rig.names(1), "a replica refuses it, since all are full"


def test_requests_of_a_lost_replica_wait_for_room(rig: Rig) -> None:
    for number in range(7):
        rig.submit(str(number), [number] * 40)
    lost = rig.names(0)
    rig.send(ReplicaDied(0, 0))
    for name in lost:
        rig.submit(name)
    assert rig.names(1) == ["1", "3", "5", "0"]
    rig.send(Ended(["1"]))
    assert rig.names(1)[4:] == ["2"]
    rig.engines[1].clear()
    rig.send(Abort("3"))
    assert [each.request_id for each in rig.engines[1]] == ["3", "4"], "the engine has room once it has aborted"
    rig.submit("7")
    rig.submit("8")
    rig.submit("9")
    rig.submit("10")
    assert [each.request_id for each in rig.workers[0] if isinstance(each, Rejected)] == ["10"], "8 are accepted"
    rig.send(ReplicaReady(0, 2))
    assert rig.names(2) == ["6", "7", "8", "9"]


def test_waiting_requests_keep_their_order_if_one_is_refused(rig: Rig) -> None:
    for number in range(9):
        rig.submit(str(number), [number] * 40)
    [full] = [each for each in (0, 1) if len(rig.names(each)) == 5]
    lost = rig.names(1 - full)
    rig.send(ReplicaDied(1 - full, 1 - full))
    for name in lost:
        rig.submit(name)
    refused, first, second = rig.names(full)[-1], *rig.names(full)[:2]
    rig.engines[full].clear()
    rig.send(Ended([refused]))
    assert rig.names(full) == []
    rig.send(Ended([first]), Ended([second]))
    assert rig.names(full) == lost[:2]


@pytest.mark.parametrize("chosen", [-1, 2, None])
def test_a_router_that_returns_an_unknown_replica_is_named(rig: Rig, chosen: Any) -> None:
    class Odd(PrefixRouter):
        def route(self, *_: Any) -> Any:
            return chosen

    rig.worker = RouterWorker(Odd(RouterSpec(2, 256)), info(), rig.connect, [])
    rig.send(ReplicaReady(0, 0), ReplicaReady(1, 1))
    with pytest.raises(PluginError, match=f"Odd'> must return .*, not {chosen}"):
        rig.submit("a")


def test_cache_events_describe_a_real_cache() -> None:
    """Blocks known from the events are those in the cache; two pages make a block."""
    cache, rng = RadixPrefixCache(8), np.random.default_rng(0)
    with IpcAddresses.create() as endpoints, Receiver[CacheEvents](endpoints.router_events, CacheEvents) as inbox:
        hooks = CacheEventHooks(endpoints.router_events)
        hooks.engine_started(info(engine_id=3))
        free, prompts, held = list(range(1, 64)), [], set[int]()
        for step in range(60):
            tokens = np.repeat(rng.integers(0, 2, 4), 8 * rng.integers(1, 3)).astype(np.int32)
            prompts.append(tokens)
            need = len(tokens) // 8
            if need > len(free):
                evicted = cache.evict(need - len(free) + int(rng.integers(3)))
                hooks.pages_evicted(evicted)
                free += evicted.tolist()
            pages, free = np.array(free[:need], np.int32), free[need:]
            inserted = cache.insert(tokens, pages)
            hooks.pages_cached(DEFAULT_NAMESPACE, tokens, inserted.pages, inserted.num_present)
            free += pages[: inserted.num_present].tolist()
            if step % 3 == 0:
                hooks.batch_finished()
                event = inbox.receive(timeout_s=0.2)
                if event is not None:
                    assert event.engine_id == 3
                    held = (held - set(event.evicted.tolist())) | set(event.inserted.tolist())
                real = set[int]()
                for each in prompts:
                    real.update(block_keys(each[: len(cache.match(each).pages) * 8], 16).tolist())
                assert held == real
        assert held
        hooks.engine_stopped()
