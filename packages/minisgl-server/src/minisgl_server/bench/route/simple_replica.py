"""Simple model of a replica, for simulations of many.

The prefix cache is a set of block keys with LRU eviction. Three things differ from `SchedulerReplica`: a request reserves the
pages of its whole output when it is admitted, so none is preempted. A prompt is in the cache once it is admitted. The cache may
evict blocks that a request uses.
"""

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from minisgl_core.contracts.router import block_keys
from minisgl_core.protocol.messages import Submit
from minisgl_core.scheduler.limits import SchedulerLimits
from minisgl_server.bench.route.replica import Replica
from minisgl_server.bench.route.requests import SimulatedRequest
from minisgl_server.bench.route.step_time import StepTime
from minisgl_server.router.cache_events import cache_events


@dataclass(slots=True)
class _Running:
    """Admitted request.

    Attributes:
        keys: block keys of prompt and output.
        num_own: pages that are not in the cache.
        num_left: prompt tokens that are not computed.
    """

    request: SimulatedRequest
    keys: list[int]
    num_own: int
    num_left: int


class SimpleReplica(Replica):
    """Model of a replica whose pages are blocks of the router; see the module. Without `engine_id`, it sends no events."""

    def __init__(self, limits: SchedulerLimits, step_time: StepTime, engine_id: int | None = None) -> None:
        super().__init__()
        self._limits, self._time, self._engine_id = limits, step_time, engine_id
        self._num_pages = limits.num_pages - 1
        self._waiting: deque[SimulatedRequest] = deque()
        self._prefilling: list[_Running] = []
        self._decoding: list[tuple[int, int, _Running]] = []
        """Heap of the last step of each request, its number, and its state."""
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._changes: dict[int, bool] = {}
        self._num_own = 0
        self._num_kv = 0
        """Tokens of context that the next step's decodes read."""
        self._step = 0

    def queue(self, request: SimulatedRequest, message: Submit) -> None:
        self._waiting.append(request)

    def start(self) -> float:
        num_new, num_pairs = self._prefill()
        if not num_new and not self._decoding:
            return math.inf
        self._step += 1
        return self._time.seconds(len(self._decoding), self._num_kv, num_new, num_pairs)

    def finish(self) -> None:
        self.first_tokens, self.ended = [], []
        self._num_kv += len(self._decoding)
        while self._decoding and self._decoding[0][0] == self._step:
            self._end(heapq.heappop(self._decoding)[2])
        for running in [each for each in self._prefilling if each.num_left == 0]:
            self._prefilling.remove(running)
            request = running.request
            self.first_tokens.append(request)
            self._num_kv += request.num_prompt + 1
            if len(request.output) == 1:
                self._end(running)
            else:
                heapq.heappush(self._decoding, (self._step + len(request.output) - 1, request.number, running))
        self.events = None
        if self._engine_id is not None and self._changes:
            self.events = cache_events(self._engine_id, self._changes)
        self._changes.clear()

    def _prefill(self) -> tuple[int, float]:
        """Compute prompt tokens. Return their number, and their pairs with tokens of their context."""
        budget, num_pairs = self._limits.max_prefill_tokens, 0.0
        for running in self._next_prefills():
            num_new = min(running.num_left, budget)
            num_pairs += num_new * (running.request.num_prompt - running.num_left + num_new / 2)
            running.num_left -= num_new
            budget -= num_new
            if budget == 0:
                break
        return self._limits.max_prefill_tokens - budget, num_pairs

    def _next_prefills(self) -> Iterator[_Running]:
        """Yield the requests with prompt tokens left, then those that can be admitted."""
        yield from list(self._prefilling)
        while self._waiting and len(self._prefilling) + len(self._decoding) < self._limits.max_running:
            if (running := self._admit(self._waiting[0])) is None:
                return
            self._waiting.popleft()
            self._prefilling.append(running)
            yield running

    def _admit(self, request: SimulatedRequest) -> _Running | None:
        """Find the cached prefix, and reserve pages. None if there are too few."""
        page_size = self._limits.page_size
        keys: list[int] = block_keys(request.sequence, page_size).tolist()
        max_cached = (request.num_prompt - 1) // page_size
        num_cached = next((index for index, key in enumerate(keys[:max_cached]) if key not in self._cache), max_cached)
        num_own = -(-(len(request.sequence) - 1) // page_size) - num_cached
        if num_own + self._num_own > self._num_pages - num_cached:
            return None
        self.num_prompt_tokens += request.num_prompt
        self.num_cached_tokens += num_cached * page_size
        running = _Running(request, keys, num_own, request.num_prompt - num_cached * page_size)
        self._num_own += num_own
        self._share(running, request.num_prompt // page_size)
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
        while len(cache) + self._num_own > self._num_pages:
            self._changes[cache.popitem(last=False)[0]] = False

    def _end(self, running: _Running) -> None:
        """Put the output into the cache too, without its last token, whose KV is not computed."""
        self.ended.append(running.request)
        self._num_kv -= len(running.request.sequence)
        self._share(running, (len(running.request.sequence) - 1) // self._limits.page_size)
        self._num_own -= running.num_own
