"""Simulation of one router with its replicas: a loop over arrivals and steps in order of time."""

import heapq
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from minisgl_core.contracts.prefix_cache import PrefixCache
from minisgl_core.contracts.router import Router, RouterSpec, block_size_for
from minisgl_core.protocol.messages import Ended, ReplicaReady, Submit
from minisgl_core.sampling_params import SamplingParams
from minisgl_server.bench.route.requests import SimulatedRequest
from minisgl_server.bench.route.scheduler_replica import Progress, ReplicaLimits, Requests, SchedulerReplica
from minisgl_server.bench.route.simple_replica import SimpleReplica
from minisgl_server.bench.route.step_time import StepTime
from minisgl_server.router.cache_events import CacheChanges
from minisgl_server.router.worker import RouterWorker, Send


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Replicas of a simulation.

    Attributes:
        overload: overload_requests and overload_ratio of `RouterSpec`.
        cache: provider of the prefix cache; None selects `SimpleReplica`.
    """

    num_replicas: int
    limits: ReplicaLimits
    step_time: StepTime
    router: type[Router]
    overload: tuple[int, float] = (16, 1.5)
    cache: type[PrefixCache] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a simulation. All but the last four are the same in each run.

    Attributes:
        num_requests: requests that have ended.
        num_prompt_tokens, num_cached_tokens, num_output_tokens: totals.
        num_routed: requests per replica.
        ttft_s: time to the first token per request, in order of arrival.
        tpot_s: time per further token, likewise; 0 if there is none.
        end_s: virtual time of the last end.
        wall_s: real time of the simulation.
        decision_s: real time that the router took for each request.
        event_s: real time that the router took for all other messages.
        stats: numbers that the router reports, such as its memory.
    """

    num_requests: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_routed: tuple[int, ...]
    ttft_s: npt.NDArray[np.float64]
    tpot_s: npt.NDArray[np.float64]
    end_s: float
    wall_s: float
    decision_s: npt.NDArray[np.float64]
    event_s: float
    stats: dict[str, Any]

    @property
    def hit_rate(self) -> float:
        """Fraction of the prompt tokens that a prefix cache had."""
        return self.num_cached_tokens / max(self.num_prompt_tokens, 1)


def simulate(setup: Setup, requests: Iterable[SimulatedRequest], num_requests: int) -> Outcome:
    """Run `num_requests` requests, which are in order of arrival, until all have ended."""
    return _Simulation(setup, num_requests).run(requests)


class _Simulation:
    def __init__(self, setup: Setup, num_requests: int) -> None:
        num_blocks = setup.num_replicas * setup.limits.num_tokens // block_size_for(setup.limits.page_size)
        router = setup.router(RouterSpec(setup.num_replicas, num_blocks, *setup.overload))
        self._running: dict[str, SimulatedRequest] = {}
        self._replicas = _replicas(setup, self._running)
        self._worker = RouterWorker(router, _info(setup), self._connect, [_ignore])
        self._router = router
        self._now_s = 0.0
        self._due: list[tuple[float, int]] = []
        """Heap of the times at which replicas end what runs. An entry is stale if its time differs from `next_s`."""
        self._ttft_s, self._tpot_s = np.full(num_requests, np.nan), np.full(num_requests, np.nan)
        self._decision_s = np.full(num_requests, np.nan)
        self._chosen = 0
        """Replica that the router has sent the last request to."""
        self._event_s = 0.0
        self._num_ended = self._num_output_tokens = 0

    def run(self, requests: Iterable[SimulatedRequest]) -> Outcome:
        begin = time.perf_counter()
        for index in range(len(self._replicas)):
            self._worker.handle(ReplicaReady(index, index))
        for request in requests:
            self._run_until(request.arrival_s)
            self._arrive(request)
        self._run_until(math.inf)
        return Outcome(
            num_requests=self._num_ended,
            num_prompt_tokens=sum(each.num_prompt_tokens for each in self._replicas),
            num_cached_tokens=sum(each.num_cached_tokens for each in self._replicas),
            num_output_tokens=self._num_output_tokens,
            num_routed=tuple(each.num_routed for each in self._worker.replicas),
            ttft_s=self._ttft_s,
            tpot_s=self._tpot_s,
            end_s=self._now_s,
            wall_s=time.perf_counter() - begin,
            decision_s=self._decision_s,
            event_s=self._event_s,
            stats=self._router.stats(),
        )

    def _connect(self, index: int) -> Send:
        def send(message: Any) -> None:
            self._chosen = index

        return send

    def _arrive(self, request: SimulatedRequest) -> None:
        name = str(request.number)
        self._running[name] = request
        sampling = SamplingParams(max_tokens=len(request.output), ignore_eos=True, temperature=0.0, seed=0)
        submit = Submit(request_id=name, token_ids=request.prompt, sampling=sampling)
        self._now_s = request.arrival_s
        begin = time.perf_counter()
        self._worker.handle(submit)
        self._decision_s[request.number] = time.perf_counter() - begin
        replica = self._replicas[self._chosen]
        replica.submit(submit, self._now_s)
        heapq.heappush(self._due, (replica.next_s, self._chosen))

    def _run_until(self, until_s: float) -> None:
        while self._due and self._due[0][0] <= until_s:
            time_s, index = heapq.heappop(self._due)
            replica = self._replicas[index]
            if time_s != replica.next_s or time_s == math.inf:
                continue
            self._now_s = time_s
            progress = replica.advance()
            if replica.next_s < math.inf:
                heapq.heappush(self._due, (replica.next_s, index))
            self._report(progress)

    def _report(self, progress: Progress) -> None:
        for name in progress.first:
            request = self._running[name]
            self._ttft_s[request.number] = self._now_s - request.arrival_s
        for name in progress.ended:
            request = self._running.pop(name)
            self._num_ended += 1
            self._num_output_tokens += len(request.output)
            since_first_s = self._now_s - request.arrival_s - self._ttft_s[request.number]
            self._tpot_s[request.number] = since_first_s / max(len(request.output) - 1, 1)
        begin = time.perf_counter()
        if progress.events is not None:
            self._worker.handle(progress.events)
        if progress.ended:
            self._worker.handle(Ended(progress.ended))
        self._event_s += time.perf_counter() - begin


def _replicas(setup: Setup, running: Requests) -> list[SchedulerReplica | SimpleReplica]:
    limits, step_time, has_events = setup.limits, setup.step_time, setup.router.uses_events
    replicas: list[SchedulerReplica | SimpleReplica] = []
    for index in range(setup.num_replicas):
        if setup.cache is None:
            replicas.append(SimpleReplica(limits, step_time, running, index if has_events else None))
        else:
            changes = CacheChanges(_info(setup, index)) if has_events else None
            replicas.append(SchedulerReplica(limits, step_time, running, setup.cache(limits.page_size), changes))
    return replicas


def _info(setup: Setup, engine_id: int = 0) -> Any:
    """Return what the router and its events read of an `EngineInfo`."""
    limits = setup.limits
    return SimpleNamespace(
        num_pages=limits.num_pages + 1, page_size=limits.page_size, max_requests=2**31, engine_id=engine_id
    )


def _ignore(message: Any) -> None:
    """Drop a message to the tokenizer workers, which the simulation does not have."""
