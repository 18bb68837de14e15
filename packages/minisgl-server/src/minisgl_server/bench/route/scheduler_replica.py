"""Replica that runs the scheduler and the prefix cache in virtual time."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

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

Requests = Mapping[str, SimulatedRequest]
"""Requests that run, by id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLimits:
    """Limits of a replica; see `SchedulerLimits`. `num_pages` does not count the padding page."""

    num_pages: int
    page_size: int = 16
    max_running: int = 256
    max_prefill_tokens: int = 8192

    @property
    def num_tokens(self) -> int:
        """Tokens of KV."""
        return self.num_pages * self.page_size


@dataclass(slots=True)
class Progress:
    """Output of one step.

    Attributes:
        first: requests whose first token it has sampled.
        ended: requests that have ended.
        events: changes of the prefix cache, if there are any and the router uses them.
    """

    first: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    events: CacheEvents | None = None


class SchedulerReplica:
    """Replica with the real scheduler and radix cache. The engine is a `StepTime` and the known outputs.

    Attributes:
        next_s: time at which the running step ends; infinity if there is none.
    """

    def __init__(
        self,
        limits: ReplicaLimits,
        step_time: StepTime,
        requests: Requests,
        cache: PrefixCache,
        changes: CacheChanges | None = None,
    ) -> None:
        """Start without requests.

        Args:
            requests: the requests that run anywhere, by id.
            changes: collects the changes of the cache, for a router that uses them.
        """
        scheduler_limits = SchedulerLimits(
            max_running=limits.max_running,
            max_prefill_tokens=limits.max_prefill_tokens,
            max_queued=2**31,
            max_seq_len=limits.num_tokens,
            num_pages=limits.num_pages + 1,
            page_size=limits.page_size,
            eos_ids=frozenset(),
            vocab_size=VOCAB_SIZE,
        )
        hooks = Hooks()
        if changes is not None:
            hooks.pages_cached, hooks.pages_evicted = changes.pages_cached, changes.pages_evicted
        self.scheduler = Scheduler(scheduler_limits, cache, FirstComeFirstServed(), hooks)
        self._changes = changes
        self._time, self._requests = step_time, requests
        self._by_row: dict[int, SimulatedRequest] = {}
        self._step: BatchPlan | None = None
        self.next_s = math.inf

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of all admitted requests."""
        return self.scheduler.stats.num_prompt_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Those that the prefix cache had."""
        return self.scheduler.stats.num_cached_tokens

    def submit(self, submit: Submit, now_s: float) -> None:
        """Queue a request, and start a step if none runs."""
        self.scheduler.submit(submit)
        if self._step is None:
            self._start(now_s)

    def advance(self) -> Progress:
        """End the running step, which is at `next_s`, and start the next one."""
        assert self._step is not None
        plan, now_s, progress = self._step, self.next_s, Progress()
        index = plan.sample.index
        tokens = np.empty(len(index), np.int64)
        positions = (plan.starts[index] + plan.num_new[index]).tolist()
        for i, (row, position) in enumerate(zip(plan.rows[index].tolist(), positions, strict=True)):
            request = self._by_row[row]
            tokens[i] = request.sequence[position]
            if position == request.num_prompt:
                progress.first.append(str(request.number))
            if position == len(request.sequence) - 1:
                progress.ended.append(str(request.number))
        self.scheduler.process(self._step, StepResult(tokens=tokens, logprobs=[], prompt_logprobs=[]))
        if self._changes is not None:
            progress.events = self._changes.take()
        self._start(now_s)
        return progress

    def _start(self, now_s: float) -> None:
        self._step = self.scheduler.schedule()
        self.next_s = math.inf if self._step is None else now_s + self._seconds(self._step)

    def _seconds(self, plan: BatchPlan) -> float:
        n = plan.num_decodes
        if len(plan.rows) > n:  # requests may have been admitted
            self._by_row = {each.row: self._requests[each.request_id] for each in self.scheduler.running}
        starts, new = plan.starts.astype(np.float64), plan.num_new.astype(np.float64)
        pairs = float((new[n:] * (starts[n:] + new[n:] / 2)).sum())
        return self._time.seconds(n, float(starts[:n].sum()) + n, int(new[n:].sum()), pairs)
