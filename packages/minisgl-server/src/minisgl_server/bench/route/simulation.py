"""Simulation of one router with its replicas: a loop over arrivals and steps in order of time."""

import heapq
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self

import numpy as np

from minisgl_core.contracts.prefix_cache import PrefixCache
from minisgl_core.contracts.router import Router, RouterSpec, block_size_for
from minisgl_core.protocol.messages import Ended, ReplicaReady, Submit
from minisgl_core.sampling_params import SamplingParams
from minisgl_core.scheduler.limits import SchedulerLimits
from minisgl_server.bench.route.replica import Replica, SchedulerReplica
from minisgl_server.bench.route.requests import SimulatedRequest
from minisgl_server.bench.route.simple_replica import SimpleReplica
from minisgl_server.bench.route.step_time import StepTime
from minisgl_server.router.cache_events import CacheChanges
from minisgl_server.router.worker import RouterWorker, Send


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Replicas of a simulation: `SimpleReplica` without a cache. `overload` has the two numbers of `RouterSpec`."""

    num_replicas: int
    limits: SchedulerLimits
    step_time: StepTime
    router: type[Router]
    overload: tuple[int, float] = (16, 1.5)
    cache: type[PrefixCache] | None = None


class Simulation:
    """Simulation of `num_requests` requests. All results but `decision_s` and `event_s` are the same in each run.

    Attributes:
        ttft_s: time to the first token per request, in order of arrival.
        tpot_s: time per further token, likewise; 0 if there is none.
        now_s: virtual time; after `run`, that of the last end.
        decision_s: real time that the router took for each request.
        event_s: real time that the router took for all other messages.
        num_prompt_tokens, num_cached_tokens: prompt tokens, and those that a prefix cache had; set by `run`.
        hit_rate: ratio of the two.
        num_routed: requests per replica; set by `run`.
        router_stats: numbers that the router reports, such as its memory; set by `run`.
    """

    def __init__(self, setup: Setup, num_requests: int) -> None:
        num_blocks = setup.num_replicas * setup.limits.max_seq_len // block_size_for(setup.limits.page_size)
        self._router = setup.router(RouterSpec(setup.num_replicas, num_blocks, *setup.overload))
        self._worker = RouterWorker(self._router, _info(setup), self._connect, [lambda message: None])
        self._replicas = [_replica(setup, index) for index in range(setup.num_replicas)]
        self._due: list[tuple[float, int]] = []
        """Heap of the times at which steps end, with their replicas."""
        self._busy: set[int] = set()
        """Replicas in `_due`, which run a step."""
        self._chosen = 0
        """Replica that the router has sent the last request to."""
        self.ttft_s, self.tpot_s, self.decision_s = (np.full(num_requests, np.nan) for _ in range(3))
        self.now_s = self.event_s = 0.0
        self.num_ended = self.num_output_tokens = 0

    def run(self, requests: Iterable[SimulatedRequest]) -> Self:
        """Run the requests, which are in order of arrival, until all have ended."""
        for index in range(len(self._replicas)):
            self._worker.handle(ReplicaReady(index, index))
        for request in requests:
            self._run_until(request.arrival_s)
            self._arrive(request)
        self._run_until(math.inf)
        self.num_prompt_tokens = sum(each.num_prompt_tokens for each in self._replicas)
        self.num_cached_tokens = sum(each.num_cached_tokens for each in self._replicas)
        self.hit_rate = self.num_cached_tokens / max(self.num_prompt_tokens, 1)
        self.num_routed = [each.num_routed for each in self._worker.replicas]
        self.router_stats = self._router.stats()
        return self

    def _connect(self, index: int) -> Send:
        def send(message: Any) -> None:
            self._chosen = index

        return send

    def _arrive(self, request: SimulatedRequest) -> None:
        sampling = SamplingParams(max_tokens=len(request.output), ignore_eos=True, temperature=0.0, seed=0)
        submit = Submit(request_id=str(request.number), token_ids=request.prompt, sampling=sampling)
        self.now_s = request.arrival_s
        begin = time.perf_counter()
        self._worker.handle(submit)
        self.decision_s[request.number] = time.perf_counter() - begin
        self._replicas[self._chosen].queue(request, submit)
        if self._chosen not in self._busy:
            self._start_step(self._chosen)

    def _run_until(self, until_s: float) -> None:
        while self._due and self._due[0][0] <= until_s:
            self.now_s, index = heapq.heappop(self._due)
            self._replicas[index].finish()
            self._start_step(index)
            self._record(self._replicas[index])

    def _start_step(self, index: int) -> None:
        self._busy.discard(index)
        if (seconds := self._replicas[index].start()) < math.inf:
            heapq.heappush(self._due, (self.now_s + seconds, index))
            self._busy.add(index)

    def _record(self, replica: Replica) -> None:
        """Record the first tokens and the ends of requests, and report the ends and events to the router."""
        for request in replica.first_tokens:
            self.ttft_s[request.number] = self.now_s - request.arrival_s
        for request in replica.ended:
            self.num_ended += 1
            self.num_output_tokens += len(request.output)
            since_first_s = self.now_s - request.arrival_s - self.ttft_s[request.number]
            self.tpot_s[request.number] = since_first_s / max(len(request.output) - 1, 1)
        begin = time.perf_counter()
        if replica.events is not None:
            self._worker.handle(replica.events)
        if replica.ended:
            self._worker.handle(Ended([str(each.number) for each in replica.ended]))
        self.event_s += time.perf_counter() - begin


def _replica(setup: Setup, index: int) -> Replica:
    limits, has_events = setup.limits, setup.router.uses_events
    if setup.cache is None:
        return SimpleReplica(limits, setup.step_time, index if has_events else None)
    changes = CacheChanges(_info(setup, index)) if has_events else None
    return SchedulerReplica(limits, setup.step_time, setup.cache(limits.page_size), changes)


def _info(setup: Setup, engine_id: int = 0) -> Any:
    """Return what the router and its events read of an `EngineInfo`."""
    limits = setup.limits
    return SimpleNamespace(
        num_pages=limits.num_pages, page_size=limits.page_size, max_requests=2**31, engine_id=engine_id
    )
