"""Replica in virtual time, with the real scheduler and prefix cache."""

import math
from abc import ABC, abstractmethod

import numpy as np

from minisgl_core.contracts.prefix_cache import PrefixCache
from minisgl_core.plugins.hooks import Hooks
from minisgl_core.protocol.batch_plan import BatchPlan, StepResult
from minisgl_core.protocol.messages import CacheEvents, Submit
from minisgl_core.scheduler.limits import SchedulerLimits
from minisgl_core.scheduler.policies import FirstComeFirstServed
from minisgl_core.scheduler.scheduler import Scheduler
from minisgl_server.bench.route.requests import VOCAB_SIZE, SimulatedRequest
from minisgl_server.bench.route.step_time import StepTime
from minisgl_server.router.cache_events import CacheChanges


def replica_limits(
    num_pages: int, page_size: int = 16, max_running: int = 256, max_prefill_tokens: int = 8192
) -> SchedulerLimits:
    """Return the limits of a replica with `num_pages` besides the padding page; a sequence may fill all of them."""
    return SchedulerLimits(
        max_running=max_running,
        max_prefill_tokens=max_prefill_tokens,
        max_queued=2**31,
        max_seq_len=num_pages * page_size,
        num_pages=num_pages + 1,
        page_size=page_size,
        eos_ids=frozenset(),
        vocab_size=VOCAB_SIZE,
    )


class Replica(ABC):
    """Replica that runs one step after another.

    Attributes:
        first_tokens: requests whose first token the last step has sampled.
        ended: requests that ended with the last step.
        events: changes of the prefix cache in the last step, if there are any and the router uses them.
        num_prompt_tokens: prompt tokens of all admitted requests.
        num_cached_tokens: those that the prefix cache had.
    """

    def __init__(self) -> None:
        self.first_tokens: list[SimulatedRequest] = []
        self.ended: list[SimulatedRequest] = []
        self.events: CacheEvents | None = None
        self.num_prompt_tokens = self.num_cached_tokens = 0

    @abstractmethod
    def queue(self, request: SimulatedRequest, message: Submit) -> None:
        """Add a request to those that wait."""

    @abstractmethod
    def start(self) -> float:
        """Start a step, and return its time; infinity if there is nothing to do."""

    @abstractmethod
    def finish(self) -> None:
        """End the step, and set the attributes that describe it."""


class SchedulerReplica(Replica):
    """Replica with the real scheduler and prefix cache. The engine is a `StepTime` and the known outputs."""

    def __init__(
        self, limits: SchedulerLimits, step_time: StepTime, cache: PrefixCache, changes: CacheChanges | None = None
    ) -> None:
        super().__init__()
        hooks = Hooks()
        if changes is not None:
            hooks.pages_cached, hooks.pages_evicted = changes.pages_cached, changes.pages_evicted
        self._scheduler = Scheduler(limits, cache, FirstComeFirstServed(), hooks)
        self._time, self._changes = step_time, changes
        self._requests: dict[str, SimulatedRequest] = {}
        self._by_row: dict[int, SimulatedRequest] = {}
        self._step: BatchPlan | None = None

    def queue(self, request: SimulatedRequest, message: Submit) -> None:
        self._requests[message.request_id] = request
        self._scheduler.submit(message)

    def start(self) -> float:
        self._step = plan = self._scheduler.schedule()
        if plan is None:
            return math.inf
        n = plan.num_decodes
        if len(plan.rows) > n:  # requests may have been admitted
            self._by_row = {each.row: self._requests[each.request_id] for each in self._scheduler.running}
            stats = self._scheduler.stats
            self.num_prompt_tokens, self.num_cached_tokens = stats.num_prompt_tokens, stats.num_cached_tokens
        starts, new = plan.starts.astype(np.float64), plan.num_new.astype(np.float64)
        pairs = float((new[n:] * (starts[n:] + new[n:] / 2)).sum())
        return self._time.seconds(n, float(starts[:n].sum()) + n, int(new[n:].sum()), pairs)

    def finish(self) -> None:
        plan = self._step
        assert plan is not None
        self.first_tokens, self.ended = [], []
        index = plan.sample.index
        tokens = np.empty(len(index), np.int64)
        positions = (plan.starts[index] + plan.num_new[index]).tolist()
        for i, (row, position) in enumerate(zip(plan.rows[index].tolist(), positions, strict=True)):
            request = self._by_row[row]
            tokens[i] = request.sequence[position]
            if position == request.num_prompt:
                self.first_tokens.append(request)
            if position == len(request.sequence) - 1:
                self.ended.append(request)
        self._scheduler.process(plan, StepResult(tokens=tokens, logprobs=[], prompt_logprobs=[]))
        self.events = None if self._changes is None else self._changes.take()
