"""Simple model of a replica, for simulations of many.

The prefix cache is a set of block keys with LRU eviction. Steps that only decode are taken together, so that the cost is per
request instead of per token. Three things differ from `SchedulerReplica`: a request reserves the pages of its whole output when
it is admitted, so none is preempted. A prompt is in the cache once it is admitted. The cache may evict blocks that a request
uses.
"""

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from minisgl_core.contracts.router import block_keys
from minisgl_core.protocol.messages import Submit
from minisgl_server.bench.route.requests import SimulatedRequest
from minisgl_server.bench.route.scheduler_replica import Progress, ReplicaLimits, Requests
from minisgl_server.bench.route.step_time import StepTime
from minisgl_server.router.cache_events import cache_events


@dataclass(slots=True)
class _Running:
    """Admitted request.

    Attributes:
        keys: block keys of prompt and output.
        num_own: pages that are not in the cache.
        num_computed: prompt tokens in the KV.
    """

    request: SimulatedRequest
    keys: list[int]
    num_own: int
    num_computed: int

    @property
    def num_left(self) -> int:
        """Prompt tokens that are not computed."""
        return self.request.num_prompt - self.num_computed


class SimpleReplica:
    """Model of a replica whose pages are blocks of the router; see the module.

    Attributes:
        next_s: time at which the running steps end; infinity if there are none.
        num_prompt_tokens, num_cached_tokens: totals of the admitted requests, as in `SchedulerReplica`.
    """

    def __init__(
        self, limits: ReplicaLimits, step_time: StepTime, requests: Requests, engine_id: int | None = None
    ) -> None:
        """Start without requests. `engine_id` is the id in the events; None for no events."""
        self._limits, self._time, self._requests, self._engine_id = limits, step_time, requests, engine_id
        self._waiting: deque[str] = deque()
        self._prefilling: list[_Running] = []
        self._decoding: list[tuple[int, int, _Running]] = []
        """Heap of the last step of each request, its number, and its state."""
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._changes: dict[int, bool] = {}
        self._num_own = 0
        self._num_kv = 0
        """Tokens of context that the next step's decodes read."""
        self._last_step = 0
        """Number of the last step that has ended."""
        self._num_steps = 0
        """Steps that run; 0 if the replica is idle."""
        self._begin_s = 0.0
        self.next_s = math.inf
        self.num_prompt_tokens = self.num_cached_tokens = 0

    def submit(self, submit: Submit, now_s: float) -> None:
        """Queue a request. Running decodes end with the step that runs now."""
        self._waiting.append(submit.request_id)
        if self._num_steps == 0:
            self._start(now_s)
        elif self._num_steps > 1:
            self._num_steps = self._steps_until(now_s)
            self.next_s = self._begin_s + self._decode_seconds(self._num_steps)

    def advance(self) -> Progress:
        """End the running steps, which is at `next_s`, and start the next ones."""
        progress = Progress()
        self._last_step += self._num_steps
        self._num_kv += self._num_steps * len(self._decoding)
        while self._decoding and self._decoding[0][0] <= self._last_step:
            self._end(heapq.heappop(self._decoding)[2], progress)
        for running in [each for each in self._prefilling if each.num_left == 0]:
            self._prefilling.remove(running)
            request = running.request
            progress.first.append(str(request.number))
            self._num_kv += request.num_prompt + 1
            if len(request.output) == 1:
                self._end(running, progress)
                continue
            heapq.heappush(self._decoding, (self._last_step + len(request.output) - 1, request.number, running))
        if self._engine_id is not None and self._changes:
            progress.events = cache_events(self._engine_id, self._changes)
            self._changes.clear()
        self._start(self.next_s)
        return progress

    def _start(self, now_s: float) -> None:
        """Run one step with prompt tokens, or else steps until the next request ends."""
        self._begin_s = now_s
        num_new, num_pairs = self._prefill()
        if num_new:
            self._num_steps = 1
            self.next_s = now_s + self._time.seconds(len(self._decoding), self._num_kv, num_new, num_pairs)
        elif self._decoding:
            self._num_steps = self._decoding[0][0] - self._last_step
            self.next_s = now_s + self._decode_seconds(self._num_steps)
        else:
            self._num_steps, self.next_s = 0, math.inf

    def _prefill(self) -> tuple[int, float]:
        """Admit requests, and compute prompt tokens. Return their number, and their pairs with tokens of their context."""
        budget, num_pairs = self._limits.max_prefill_tokens, 0.0
        for running in self._next_prefills():
            num_new = min(running.num_left, budget)
            num_pairs += num_new * (running.num_computed + num_new / 2)
            running.num_computed += num_new
            budget -= num_new
            if budget == 0:
                break
        return self._limits.max_prefill_tokens - budget, num_pairs

    def _next_prefills(self) -> Iterator[_Running]:
        """Yield the requests with prompt tokens left, then those that can be admitted."""
        yield from list(self._prefilling)
        while self._waiting and len(self._prefilling) + len(self._decoding) < self._limits.max_running:
            request = self._requests[self._waiting[0]]
            if (running := self._admit(request)) is None:
                return
            self._waiting.popleft()
            self._prefilling.append(running)
            yield running

    def _admit(self, request: SimulatedRequest) -> _Running | None:
        """Find the cached prefix, and reserve pages. None if there are too few."""
        page_size = self._limits.page_size
        keys: list[int] = block_keys(request.sequence, page_size).tolist()
        most = (request.num_prompt - 1) // page_size
        num_cached = next((index for index, key in enumerate(keys[:most]) if key not in self._cache), most)
        num_own = -(-(len(request.sequence) - 1) // page_size) - num_cached
        if num_own + self._num_own > self._limits.num_pages - num_cached:
            return None
        self.num_prompt_tokens += request.num_prompt
        self.num_cached_tokens += num_cached * page_size
        num_prompt_pages = request.num_prompt // page_size
        running = _Running(request, keys, num_own, num_cached * page_size)
        self._num_own += num_own
        self._share(running, num_prompt_pages)
        return running

    def _share(self, running: _Running, num_pages: int) -> None:
        """Put the first pages of a request into the cache, the last one first so that LRU evicts it first."""
        cache = self._cache
        for key in reversed(running.keys[:num_pages]):
            if key in cache:
                cache.move_to_end(key)
                continue
            cache[key] = None
            self._changes[key] = True
            running.num_own -= 1
            self._num_own -= 1
        while len(cache) + self._num_own > self._limits.num_pages:
            self._changes[cache.popitem(last=False)[0]] = False

    def _end(self, running: _Running, progress: Progress) -> None:
        """Put the output into the cache too, without its last token, whose KV is not computed."""
        request = running.request
        progress.ended.append(str(request.number))
        self._num_kv -= len(request.sequence)
        self._share(running, (len(request.sequence) - 1) // self._limits.page_size)
        self._num_own -= running.num_own

    def _decode_seconds(self, num_steps: int) -> float:
        """Return the time of decode steps; each one reads one token more per request than the one before."""
        n = len(self._decoding)
        return num_steps * self._time.seconds(n, self._num_kv + n * (num_steps - 1) / 2)

    def _steps_until(self, now_s: float) -> int:
        """Return the number of steps that have begun by a time, at least 1."""
        low, high = 1, self._num_steps
        while low < high:
            middle = (low + high) // 2
            if self._begin_s + self._decode_seconds(middle) >= now_s:
                high = middle
            else:
                low = middle + 1
        return low
