"""Logic of the router's process: it routes requests, and tracks which replica runs each request."""

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from minisgl_core.contracts.prefix_cache import CacheNamespace
from minisgl_core.contracts.router import RoutedPrompt, Router, RouterSpec, block_size_for
from minisgl_core.errors import PluginError
from minisgl_core.plugins.registry import Registry
from minisgl_core.protocol.engine_snapshot import ReplicaState, SnapshotRequest
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
from minisgl_server.options import ServerOptions

logger = logging.getLogger(__name__)

Send = Callable[[msgspec.Struct], None]
Message = Submit | Abort | Ended | RequestCounts | SnapshotRequest | ReplicaReady | ReplicaDied | NoReplica


def make_router(options: ServerOptions, info: EngineInfo, registry: Registry) -> Router:
    """Return a router for the replicas of a server, with room for all blocks that their KV pools hold."""
    num_blocks = options.replicas * info.num_pages * info.page_size // block_size_for(info.page_size)
    spec = RouterSpec(options.replicas, num_blocks, options.router_overload_requests, options.router_overload_ratio)
    router: Router = registry.load("router", options.router)(spec)
    return router


@dataclass(slots=True)
class Replica:
    """A replica and its load; a `minisgl_core.contracts.router.ReplicaView`.

    Attributes:
        engine_id: id of its engine; meaningless if `send` is None.
        send: sends to the scheduler of its engine; None if that is not ready.
        num_starts: number of its engines that have become ready.
        num_routed: requests since the start of the server.
    """

    replica: int
    engine_id: int = 0
    send: Send | None = None
    num_starts: int = 0
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_routed: int = 0

    def state(self) -> ReplicaState:
        """Return the state for display."""
        return ReplicaState(
            replica=self.replica,
            is_ready=self.send is not None,
            num_starts=self.num_starts,
            num_requests=self.num_requests,
            num_routed=self.num_routed,
        )


class _Routed(NamedTuple):
    """Request at a replica: the worker that its output goes to, and its load."""

    replica: Replica
    worker: int
    num_tokens: int


class RouterWorker:
    """Logic of the router, without its sockets. `connect` returns the function that sends to the scheduler of an engine.

    A request waits if no replica has room and one is not ready. Waiting and running requests together are limited to what all
    replicas accept.
    """

    def __init__(
        self, router: Router, info: EngineInfo, connect: Callable[[int], Send], to_workers: Sequence[Send]
    ) -> None:
        self._router, self._connect, self._to_workers = router, connect, to_workers
        self._block_size = block_size_for(info.page_size)
        self._max_requests = info.max_requests
        self._max_per_replica = info.max_requests // router.spec.num_replicas
        self.replicas = [Replica(index) for index in range(router.spec.num_replicas)]
        self._requests: dict[str, _Routed] = {}
        self._waiting: dict[str, Submit] = {}
        """Requests that wait for a replica, in order."""
        self._has_failed = False
        """True if no replica is ready, and none is expected to be soon."""
        self._counting: dict[int, tuple[RequestCounts, set[int], Replica]] = {}
        """By the correlation id of a question to a replica: counts so far, ids of the questions without an answer, replica."""
        self._correlation_ids = itertools.count()
        self._asked: dict[tuple[int, int], tuple[Replica, SnapshotRequest]] = {}
        """By worker and `SnapshotRequest.replica`: the replica that was asked last, and the request."""

    def handle(self, message: Message | CacheEvents) -> None:
        """Handle a message of a tokenizer worker, a replica or the launcher."""
        match message:
            case Submit():
                self._submit(message)
            case Abort(request_id):
                self._waiting.pop(request_id, None)
                routed = self._requests.get(request_id)
                if routed is not None and routed.replica.send is not None:
                    routed.replica.send(message)
                self._release(request_id)
            case Ended(request_ids):
                for request_id in request_ids:
                    self._release(request_id)
            case CacheEvents():
                self._apply(message)
            case ReplicaReady(index, engine_id):
                self._connect_replica(self.replicas[index], engine_id)
            case ReplicaDied(index, engine_id):
                self._lose(self.replicas[index], engine_id)
            case NoReplica():
                self._has_failed, waiting, self._waiting = True, self._waiting, {}
                for submit in waiting.values():
                    self._enqueue(submit)  # refuses it, since `_has_failed` is set
            case RequestCounts():
                self._count(message)
            case SnapshotRequest():
                self._ask(message)

    def _ready(self) -> list[Replica]:
        return [each for each in self.replicas if each.send is not None]

    def _ask(self, message: SnapshotRequest) -> None:
        """Forward a request to its replica, or to another one if that is not ready. Answer `NoSnapshot` if none is ready."""
        message.replicas = [each.state() for each in self.replicas]
        asked = min(self._ready(), key=lambda each: each.replica != message.replica, default=None)
        if asked is None or asked.send is None:
            self._to_workers[message.worker](NoSnapshot(message.correlation_id))
            return
        self._asked[message.worker, message.replica] = asked, message
        asked.send(message)

    def _submit(self, submit: Submit) -> None:
        """Send a request to a replica with room, or to any if all are ready. Otherwise, it waits for one that is not ready."""
        candidates = [each for each in self._ready() if each.num_requests < self._max_per_replica]
        if not candidates:
            candidates = self._ready()
            if len(candidates) < len(self.replicas):
                self._enqueue(submit)
                return
        namespace = CacheNamespace(submit.cache_salt, submit.adapter_id)
        prompt = RoutedPrompt(submit.token_ids, self._block_size, namespace, submit.user)
        chosen = self._router.route(prompt, candidates)
        replica = next((each for each in candidates if each.replica == chosen), None)
        if replica is None:
            raise PluginError(f"route of {type(self._router)} must return the index of a replica given, not {chosen!r}")
        assert replica.send is not None, "only ready replicas are candidates"
        replica.send(submit)
        self._requests[submit.request_id] = _Routed(replica, submit.worker, len(submit.token_ids))
        replica.num_requests += 1
        replica.num_prompt_tokens += len(submit.token_ids)
        replica.num_routed += 1

    def _enqueue(self, submit: Submit) -> None:
        """Add a request to those that wait for a replica, unless these are too many or all replicas fail repeatedly."""
        if self._has_failed:
            kind = "no_replica"
            message = "No replica is ready; each has failed repeatedly and is restarted after a delay."
        elif len(self._waiting) + len(self._requests) < self._max_requests:
            self._waiting[submit.request_id] = submit
            return
        else:
            kind = "queue_full"
            message = f"no replica has room, and {len(self._waiting)} requests are waiting already; try again later"
        # No engine sent this, so the loss of an engine does not discard it.
        self._to_workers[submit.worker](
            Rejected(request_id=submit.request_id, kind=kind, message=message, engine_id=-1)
        )

    def _release(self, request_id: str) -> _Routed | None:
        """Remove a request that has ended, and route a waiting one."""
        routed = self._requests.pop(request_id, None)
        if routed is not None:
            routed.replica.num_requests -= 1
            routed.replica.num_prompt_tokens -= routed.num_tokens
            replica = routed.replica
            # The end of a request that a full replica refused frees no room. Then the first waiting request keeps its place.
            if self._waiting and replica.send is not None and replica.num_requests < self._max_per_replica:
                self._submit(self._waiting.pop(next(iter(self._waiting))))
        return routed

    def _apply(self, events: CacheEvents) -> None:
        replica = self.replicas[events.engine_id % len(self.replicas)]
        if replica.send is None or replica.engine_id != events.engine_id:
            return  # the events of an engine that has ended
        if len(events.evicted):
            self._router.evicted(replica.replica, events.evicted)
        if len(events.inserted):
            self._router.inserted(replica.replica, events.inserted)

    def _connect_replica(self, replica: Replica, engine_id: int) -> None:
        replica.engine_id, replica.send = engine_id, self._connect(engine_id)
        replica.num_starts += 1
        self._has_failed = False
        waiting, self._waiting = self._waiting, {}
        for submit in waiting.values():
            self._submit(submit)

    def _lose(self, replica: Replica, engine_id: int) -> None:
        """Tell the tokenizer workers which requests were lost with an engine; they submit some of them again."""
        replica.send = None
        lost: list[list[str]] = [[] for _ in self._to_workers]
        for request_id in [name for name, routed in self._requests.items() if routed.replica is replica]:
            routed = self._release(request_id)
            assert routed is not None
            lost[routed.worker].append(request_id)
        self._router.lost(replica.replica)
        for to_worker, request_ids in zip(self._to_workers, lost, strict=True):
            to_worker(ReplicaLost(engine_id, request_ids))
        logger.warning("replica %d was lost with %d requests", replica.replica, sum(map(len, lost)))
        for correlation_id in [number for number, (*_, asked) in self._counting.items() if asked is replica]:
            self._add_counts(correlation_id, {})
        for asked, message in list(self._asked.values()):
            if asked is replica:
                self._ask(message)  # it may have had no time to answer; a second answer is ignored

    def _count(self, message: RequestCounts) -> None:
        """Begin a count by asking all replicas, or add the answer of one."""
        # `IpcAddresses.scheduler_out` lists the router after the tokenizer workers.
        own_index = len(self._to_workers)
        if message.worker == own_index:
            self._add_counts(message.correlation_id, message.counts)
            return
        message.counts["router"] = len(self._requests) + len(self._waiting)
        asked = {next(self._correlation_ids): each for each in self._ready()}
        open_ids = set(asked)
        self._counting |= {correlation_id: (message, open_ids, each) for correlation_id, each in asked.items()}
        for correlation_id, each in asked.items():
            assert each.send is not None
            each.send(RequestCounts(worker=own_index, correlation_id=correlation_id))
        if not asked:
            self._to_workers[message.worker](message)

    def _add_counts(self, correlation_id: int, counts: Mapping[str, int]) -> None:
        """Add the counts of a replica, which are empty if it ended. Return a count to its worker after the last replica."""
        if correlation_id not in self._counting:
            return  # the replica was lost
        message, open_ids, _ = self._counting.pop(correlation_id)
        for name, value in counts.items():
            message.counts[name] = message.counts.get(name, 0) + value
        open_ids.remove(correlation_id)
        if not open_ids:
            self._to_workers[message.worker](message)
