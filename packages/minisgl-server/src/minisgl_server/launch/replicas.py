"""Engines of a server: starts their ranks, and restarts a replica that dies."""

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from minisgl_core.config.options import EngineConfig
from minisgl_core.errors import InvalidValueError, WorkerDiedError, WorkerRefusedError
from minisgl_core.plugins.hooks import Hooks
from minisgl_core.plugins.registry import Registry
from minisgl_core.protocol.messages import EngineInfo, NoReplica, ReplicaDied, ReplicaReady
from minisgl_core.runtime.executor_selection import make_executor
from minisgl_core.runtime.ipc import IpcAddresses, Sender
from minisgl_core.runtime.supervisor import Supervisor
from minisgl_server.launch.restarts import MAX_FAILURES, RestartableProcesses
from minisgl_server.metrics.engine_metrics import drop_gauges

logger = logging.getLogger(__name__)

ROUTER = "router"
"""Name of the router's process."""
RUN_RANK = "minisgl_core.runtime.worker:run_worker"


class Replicas(RestartableProcesses):
    """Engines of one launch, one per replica.

    Several replicas share this host: with `size` ranks per replica, replica r has the devices ``[r * size, (r + 1) * size)``, or
    its part of the CPU cores. A single replica has what its executor reserves, which may be on other nodes.

    Args:
        startup_timeout_s: time that an engine has to start. After that, its ranks that are not ready are killed.
        tell_api: sends `NoReplica` to the API server, and `EngineInfo` when a replica is ready again.
    """

    def __init__(
        self,
        config: EngineConfig,
        registry: Registry,
        supervisor: Supervisor,
        addresses: IpcAddresses,
        startup_timeout_s: float = math.inf,
        tell_api: Callable[[NoReplica | EngineInfo], None] = lambda message: None,
    ) -> None:
        super().__init__(supervisor, addresses, addresses.num_replicas)
        self._tell_api = tell_api
        self._startup_timeout_s = startup_timeout_s
        self._deadline_s: dict[int, float] = {}
        """Time by which the ranks must be ready, by index of the replica; replicas that have started are missing."""
        self._executor = make_executor(config, registry, supervisor, addresses.num_replicas)
        self._cores: list[list[int]] = []
        """Cores of each replica; empty if they share all cores."""
        if self._num > 1:
            config = self._divide_host(config, registry)
        self._config = config
        self._engine_ids = {replica: replica - self._num for replica in range(self._num)}
        """Id of the engine by index of the replica; replicas that stay down are missing.

        Each start of a replica makes a new engine. After k restarts, its id is ``replica + k * num_replicas``; before the first
        start, it is negative.
        """
        self._ready_s: dict[int, float] = {}
        """Time of readiness, by id of the engine; only of engines that the router knows."""
        self.info: EngineInfo | None = None
        """Description of the engines, once all have started."""
        self._is_draining = self._no_replica = False
        self.drain_error: WorkerDiedError | None = None
        """Error of the first replica that failed during the drain, whose requests may be lost."""
        self._router: Sender | None = None

    def close(self) -> None:
        """Free what the executor has reserved, after the processes have ended."""
        self._executor.close()
        if self._router is not None:
            self._router.drop()

    def are_ready(self) -> bool:
        """Return True if the ranks of all replicas are ready."""
        return self._supervisor.ready.keys() >= {name for replica in self._engine_ids for name in self._names(replica)}

    def mark_ready(self) -> EngineInfo:
        """Note that all engines have started: from now on, `handle_failure` restarts one of several replicas after any error.

        Return the description of the first engine, with the sum of all engines' request limits.
        """
        info = self._supervisor.ready[self._names(0)[0]].engine_info
        assert info is not None, "rank 0 describes the engine"
        self.info = msgspec.structs.replace(info, max_requests=info.max_requests * self._num)
        return self.info

    def drain(self) -> None:
        """Restart no replica from now on."""
        self._is_draining = True
        for replica in self.due_s:
            del self._engine_ids[replica]
            self._deadline_s.pop(replica, None)
        self.due_s.clear()

    def check(self) -> None:
        """Tell the router, once it is ready, which engines have become ready since the last call."""
        if ROUTER not in self._supervisor.ready:
            return
        for replica, engine_id in self._engine_ids.items():
            if engine_id not in self._ready_s and self._supervisor.ready.keys() >= set(self._names(replica)):
                self._ready_s[engine_id] = time.monotonic()
                self._tell_router(ReplicaReady(replica, engine_id))
                if self._no_replica and self.info is not None:
                    self._no_replica = False
                    self._tell_api(self.info)

    def handle_failure(self, error: WorkerDiedError) -> bool:
        """End the other ranks of a replica, tell the router, and schedule its restart, unless it is the only replica.

        Nothing is restarted while the server stops. Before the server is ready, an error that the user can correct ends the
        launch, as do `MAX_FAILURES` failures in a row.
        """
        replica = next((each for each in self._engine_ids if error.process in self._names(each)), -1)
        if self._num == 1 or replica < 0:
            return False
        engine_id, now_s = self._engine_ids[replica], time.monotonic()
        pid = self._supervisor.pid(self._names(replica)[0])
        self._supervisor.discard(*self._names(replica))
        self._deadline_s.pop(replica, None)
        drop_gauges(pid)
        if engine_id in self._ready_s:
            self._tell_router(ReplicaDied(replica, engine_id))
        if self._is_draining:
            logger.error("%s Replica %d stays down, because the server is stopping.", error, replica)
            del self._engine_ids[replica]
            self.drain_error = self.drain_error or error
            return bool(self._engine_ids)
        if self.info is None and (
            isinstance(error, WorkerRefusedError) or self.backoffs[replica].num_failures == MAX_FAILURES - 1
        ):
            return False
        self.restart_later(replica, f"Replica {replica}", now_s - self._ready_s.pop(engine_id, now_s), error)
        is_any_ready = any(engine_id in self._ready_s for engine_id in self._engine_ids.values())
        if (
            self.info is not None
            and not is_any_ready
            and all(self.backoffs[each].num_failures >= 2 for each in self._engine_ids)
        ):
            self._no_replica = True
            no_replica = NoReplica(max(1.0, min(self.due_s.values()) - now_s))
            self._tell_router(no_replica)
            self._tell_api(no_replica)
        return True

    def start_due(self) -> float:
        """Also kill the ranks that are not ready in time. The supervisor reports them as ranks that have died."""
        now_s = time.monotonic()
        for replica, deadline_s in list(self._deadline_s.items()):
            late = [name for name in self._names(replica) if name not in self._supervisor.ready]
            if not late:
                del self._deadline_s[replica]
            elif deadline_s <= now_s:
                del self._deadline_s[replica]
                reason = f"was not ready within --startup-timeout {self._startup_timeout_s:g} (seconds), and was killed"
                for name in late:
                    self._supervisor.kill(name, reason)
        return min(super().start_due(), min(self._deadline_s.values(), default=math.inf))

    def start_one(self, index: int) -> None:
        """Start an engine with a new id, and a directory of its own if there are several replicas."""
        replica = index
        self._engine_ids[replica] += self._num
        engine_id = self._engine_ids[replica]
        addresses = self._addresses.of_engine(engine_id)
        directory = addresses.directory
        if self._num > 1:
            directory = f"{directory}/engine-{engine_id}"
            Path(directory).mkdir(mode=0o700)
        size = self._config.parallel.size
        placements = [
            replace(each, local_rank=each.local_rank + replica * size) for each in self._executor.place(directory)
        ]
        with self._on_cores(replica):
            for name, each in zip(self._names(replica), placements, strict=True):
                self._executor.start(name, each, RUN_RANK, self._config, placements, each.rank, addresses)
                if self._num == 1:
                    self._supervisor.wait(timeout_s=0)  # of too many ranks, the first refuse while others are started
        self._deadline_s[replica] = time.monotonic() + self._startup_timeout_s

    def _names(self, replica: int) -> list[str]:
        """Return the names of a replica's processes in rank order."""
        owner = "engine" if self._num == 1 else f"replica {replica}"
        return [f"{owner} rank {rank}" for rank in range(self._config.parallel.size)]

    def _tell_router(self, message: ReplicaReady | ReplicaDied | NoReplica) -> None:
        if self._router is None:
            # ZeroMQ keeps the order of one sender's messages only.
            self._router = Sender(self._addresses.router_in)
        self._router.send(message)

    def _divide_host(self, config: EngineConfig, registry: Registry) -> EngineConfig:
        """On a CPU host, divide cores and memory among the replicas; otherwise check that there are enough devices."""
        from minisgl_core.platforms.selection import pick_platform, preferred_by

        hardware = pick_platform(config.backends.platform, registry, preferred_by(Hooks(registry)))[1]
        if hardware.torch_name != "cpu":
            size = config.parallel.size
            if hardware.num_devices < self._num * size:
                allowed = f"at most {hardware.num_devices // size} with --tp {config.parallel.tp} and --pp {config.parallel.pp}"
                raise InvalidValueError("--replicas", self._num, allowed, f"There are {hardware.num_devices} devices.")
            return config
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        if len(cores) >= self._num:
            size = len(cores) // self._num
            self._cores = [cores[replica * size : (replica + 1) * size] for replica in range(self._num)]
        part = replace(config.cache, memory_ratio=config.cache.memory_ratio / self._num)
        return replace(config, cache=part)

    @contextmanager
    def _on_cores(self, replica: int) -> Iterator[None]:
        """Pin this process to a replica's cores. Child processes that start within the context inherit them."""
        if not self._cores:
            yield
            return
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._cores[replica])
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)
