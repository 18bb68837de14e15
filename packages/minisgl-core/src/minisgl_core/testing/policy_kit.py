"""Conformance kit of scheduling policies."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest

from minisgl_core.contracts.policy import Policy, RequestView


@dataclass(frozen=True, slots=True)
class Request:
    """Waiting or running request with the properties of `RequestView`."""

    priority: int
    arrival: int
    arrival_s: float
    user: str
    num_prompt_tokens: int
    max_tokens_left: int


class Queue:
    """Random requests in the order in which the scheduler passes them, with their numbers of cached tokens.

    Attributes:
        waiting: waiting requests by priority, then arrival.
        running: running requests in random order.
        num_calls: number of calls of `num_cached` per request, by arrival.
    """

    def __init__(self, length: int, num_priorities: int, seed: int) -> None:
        draw = random.Random(seed)
        requests = [
            Request(
                priority=draw.randrange(num_priorities),
                arrival=arrival,
                arrival_s=arrival / 100,
                user=draw.choice(("", "a", "b", "c")),
                num_prompt_tokens=draw.randint(1, 4000),
                max_tokens_left=draw.randint(1, 40),
            )
            for arrival in draw.sample(range(10**6), length + length // 3)
        ]
        self.waiting = sorted(requests[:length], key=lambda request: (request.priority, request.arrival))
        self.running = requests[length:]
        self._cached = {request.arrival: draw.choice((0, 0, 16, 512)) for request in requests}
        self.num_calls: Counter[int] = Counter()

    def num_cached(self, request: RequestView) -> int:
        """Return the number of cached tokens of a request, and count the call in `num_calls`."""
        self.num_calls[request.arrival] += 1
        return self._cached[request.arrival]

    def ordered_by(self, policy: Policy) -> Sequence[RequestView]:
        """Return the policy's order. The policy gets copies of the lists, as in the scheduler."""
        return policy.order(list(self.waiting), list(self.running), self.num_cached)


class PolicyTests:
    """Tests of a scheduling policy. Subclass this and set `provider`."""

    provider: ClassVar[type[Policy]]

    @pytest.mark.parametrize("length", [0, 1, 2, 50, 1000])
    @pytest.mark.parametrize("num_priorities", [1, 3])
    def test_order_has_each_waiting_request_once(self, length: int, num_priorities: int) -> None:
        """The order has each waiting request exactly once, since a missing one would wait forever."""
        for seed in range(5):
            queue = Queue(length, num_priorities, seed)
            order = queue.ordered_by(self.provider())
            assert isinstance(order, Sequence), "the order is not a sequence, such as a list"
            assert sorted(map(id, order)) == sorted(map(id, queue.waiting)), "not a permutation of the waiting requests"

    def test_lower_priorities_run_first(self) -> None:
        """Requests are ordered by priority, lowest value first; the policy orders requests of equal priority."""
        for seed in range(20):
            order = Queue(60, 4, seed).ordered_by(self.provider())
            priorities = [request.priority for request in order]
            assert priorities == sorted(priorities), f"priorities in the order of admission: {priorities}"

    def test_order_is_deterministic(self) -> None:
        """The order depends only on the queue and the cached tokens; a new instance has the same order."""
        policy = self.provider()
        for seed in range(20):
            queue = Queue(40, 2, seed)
            orders = [list(queue.ordered_by(each)) for each in (policy, policy, self.provider())]
            assert orders[0] == orders[1] == orders[2], "the order differs from call to call"

    def test_num_cached_is_called_once_per_request(self) -> None:
        """The policy calls `num_cached` at most once per request, since each call matches the whole prompt."""
        queue = Queue(300, 2, seed=0)
        queue.ordered_by(self.provider())
        num_calls = max(queue.num_calls.values(), default=0)
        assert num_calls <= 1, "the policy calls num_cached several times per request"
