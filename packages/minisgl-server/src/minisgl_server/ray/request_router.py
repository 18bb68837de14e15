"""Serve's request router of the deployment Engine, which asks the router of ``--router``.

Serve makes an `EngineRequestRouter` in the process of each caller. It shares a `RoutingTable` with the API's code in that
process. The table has a lock, since Serve runs the router in a thread of its own unless `SERVE_ENVIRONMENT` is set.
"""

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from minisgl_core.contracts.prefix_cache import CacheNamespace
from minisgl_core.contracts.router import RoutedPrompt, Router, block_size_for
from minisgl_core.protocol.messages import CacheEvents, EngineInfo, Submit

table: "RoutingTable | None" = None
"""Table of this process; None outside the API, where no requests are routed."""
replica_ids: list[str] = []
"""Ids of the running replicas."""
HEARTBEAT_TIMEOUT_TICKS = 10
"""Calls of `RoutingTable.tick` without a heartbeat of an engine after which it is lost."""


class EngineRequestRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Asks the `RoutingTable` of this process for the replica of each request. Other calls name their replica."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Store the ids of the running replicas; Serve calls this when they change."""
        from minisgl_server.ray import request_router  # not this class's copy, see `choose_replicas`

        super().update_replicas(replicas)
        request_router.replica_ids = [each.replica_id.unique_id for each in replicas]

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the one replica that the router of ``--router`` chooses, of those that have room."""
        # Serve pickles this class with a copy of its module's globals; the table is in the module itself.
        from minisgl_server.ray.request_router import table

        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # or Serve would call this again without a pause
        if (wanted := pending_request.kwargs.get("replica_id")) is not None:
            return [[each for each in candidate_replicas if each.replica_id.unique_id == wanted] or candidate_replicas]
        if table is None or "request_id" not in pending_request.kwargs:
            return [candidate_replicas]
        available = {each.replica_id.unique_id: each for each in self.select_available_replicas(candidate_replicas)}
        running = [each.unique_id for each in self.curr_replicas]
        chosen = table.choose(pending_request.kwargs["request_id"], list(available), running)
        if chosen is None:
            return [candidate_replicas]  # full replicas are asked for their load, and this is called again
        # The engine puts this id into its output, so that output of a lost engine is recognised.
        pending_request.kwargs["engine_id"] = chosen.engine_id
        return [[available[chosen.replica_id]]]


@dataclass(slots=True)
class RoutingEntry:
    """Entry of the routing table: an engine and its load; a `minisgl_core.contracts.router.ReplicaView`.

    Attributes:
        engine_id: id of the engine for tokenizer workers: index plus a multiple of the number of entries, larger after each
            loss.
        replica_id: id of the replica in Serve; empty for a free entry.
        ticks_since_heartbeat: calls of `tick` since its last heartbeat, counted while it has requests. From
            `HEARTBEAT_TIMEOUT_TICKS` on, it counts as lost, until its next heartbeat.
    """

    replica: int
    engine_id: int
    replica_id: str = ""
    num_requests: int = 0
    num_prompt_tokens: int = 0
    ticks_since_heartbeat: int = 0


class RoutingTable:
    """Engines and the requests of this process. Methods may be called by any thread.

    The router has an index for each replica that may run, and more for those that are stopping.
    """

    def __init__(self, router: Router, info: EngineInfo) -> None:
        self._router, self._block_size = router, block_size_for(info.page_size)
        self._engines = [RoutingEntry(index, index) for index in range(router.spec.num_replicas)]
        self._submits: dict[str, Submit] = {}
        self._routed: dict[str, tuple[RoutingEntry, int]] = {}
        """Engine of each request, and the id that the engine had then."""
        self._lock = threading.Lock()

    def begin(self, submit: Submit) -> None:
        """Add a request, which can be routed until `end`."""
        with self._lock:
            self._unroute(submit.request_id)
            self._submits[submit.request_id] = submit

    def end(self, request_id: str) -> None:
        """Remove a request."""
        with self._lock:
            self._unroute(request_id)
            self._submits.pop(request_id, None)

    def choose(self, request_id: str, available: Sequence[str], running: Sequence[str]) -> RoutingEntry | None:
        """Select an engine with room, and count the request as its load. None if none has room or the request has ended."""
        with self._lock:
            self._unroute(request_id)
            submit = self._submits.get(request_id)
            assigned = {each.replica_id: each for each in self._engines}
            engines = [assigned.get(each) or self._assign_entry(each, running) for each in available]
            alive = [each for each in engines if each and each.ticks_since_heartbeat < HEARTBEAT_TIMEOUT_TICKS]
            if submit is None or not alive:
                return None
            if submit.session_id:  # rendezvous hashing: few sessions move when the replicas change
                alive = [max(alive, key=lambda each: _weight(submit.session_id, each.replica_id))]
            namespace = CacheNamespace(submit.cache_salt, submit.adapter_id)
            prompt = RoutedPrompt(submit.token_ids, self._block_size, namespace, submit.user)
            chosen = self._engines[self._router.route(prompt, sorted(alive, key=lambda each: each.replica))]
            chosen.num_requests += 1
            chosen.num_prompt_tokens += len(submit.token_ids)
            self._routed[request_id] = chosen, chosen.engine_id
            return chosen

    def lose(self, request_id: str) -> tuple[int, list[Submit]]:
        """Note that the engine of a request is lost, and return its id and its requests.

        The id is -1 if no engine was chosen for the request, which is returned alone, or if the loss was noted before.
        """
        with self._lock:
            engine, engine_id = self._routed.get(request_id, (None, -1))
            if engine is None:
                return -1, [self._submits[request_id]]
            if engine.engine_id != engine_id:
                return -1, []
            lost = [self._submits[name] for name, routed in self._routed.items() if routed == (engine, engine_id)]
            self._renew(engine)
            return engine_id, lost

    def tick(self) -> list[Submit]:
        """Count a second without heartbeat for engines with requests. Return a request of each engine that is lost as of now."""
        with self._lock:
            for engine in self._engines:
                if engine.num_requests:
                    engine.ticks_since_heartbeat += 1
                elif engine.ticks_since_heartbeat < HEARTBEAT_TIMEOUT_TICKS:
                    engine.ticks_since_heartbeat = 0
            lost = {
                engine.replica: name
                for name, (engine, _) in self._routed.items()
                if engine.ticks_since_heartbeat == HEARTBEAT_TIMEOUT_TICKS
            }
            return [self._submits[name] for name in lost.values()]

    def heartbeat(self, replica_id: str) -> None:
        """Note a heartbeat of a replica, or another message."""
        with self._lock:
            for engine in self._engines:
                if engine.replica_id == replica_id:
                    engine.ticks_since_heartbeat = 0

    def apply(self, replica_id: str, events: CacheEvents) -> None:
        """Tell the router what a replica's prefix cache has taken and evicted."""
        with self._lock:
            for engine in self._engines:
                if engine.replica_id == replica_id:
                    self._router.evicted(engine.replica, events.evicted)
                    self._router.inserted(engine.replica, events.inserted)

    def _assign_entry(self, replica_id: str, running: Sequence[str]) -> RoutingEntry | None:
        """Assign a new replica a free entry, or that of an ended replica; return None if all entries are in use."""
        free = (each for each in self._engines if each.replica_id not in running and not each.num_requests)
        engine = next(free, None)
        if engine is not None:
            if engine.replica_id:
                self._renew(engine)
            engine.replica_id, engine.ticks_since_heartbeat = replica_id, 0
        return engine

    def _renew(self, engine: RoutingEntry) -> None:
        """Give an entry a new engine id, for a replica whose prefix cache is unknown."""
        engine.engine_id += len(self._engines)
        self._router.lost(engine.replica)

    def _unroute(self, request_id: str) -> None:
        if request_id in self._routed:
            engine, _ = self._routed.pop(request_id)
            engine.num_requests -= 1
            engine.num_prompt_tokens -= len(self._submits[request_id].token_ids)


def _weight(session_id: str, replica_id: str) -> bytes:
    return hashlib.blake2b(f"{replica_id} {session_id}".encode()).digest()
