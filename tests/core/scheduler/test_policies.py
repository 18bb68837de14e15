"""The shipped policies pass the kit and order requests as documented; the kit catches broken policies."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cmp_to_key
from itertools import pairwise
from typing import Any

import pytest
from kit_runner import iter_failures

from minisgl_core.contracts.policy import Policy, RequestView
from minisgl_core.scheduler.policies import FirstComeFirstServed, LongestOutputFirst, LongestPrefixMatch
from minisgl_core.testing.policy_kit import PolicyTests, Queue

NumCached = Callable[[RequestView], int]
Waiting = Sequence[RequestView]


class TestFirstComeFirstServed(PolicyTests):
    provider = FirstComeFirstServed


class TestLongestPrefixMatch(PolicyTests):
    provider = LongestPrefixMatch


class TestLongestOutputFirst(PolicyTests):
    provider = LongestOutputFirst


def test_first_come_first_served() -> None:
    queue = Queue(50, 3, seed=1)
    assert list(queue.ordered_by(FirstComeFirstServed())) == queue.waiting
    assert not queue.num_calls


def test_longest_prefix_first_within_the_lookahead() -> None:
    queue = Queue(500, 1, seed=2)
    found = queue.ordered_by(LongestPrefixMatch())
    window = LongestPrefixMatch.window
    assert set(queue.num_calls) == {request.arrival for request in queue.waiting[:window]}
    cached = [queue.num_cached(request) for request in found]
    assert cached[:window] == sorted(cached[:window], reverse=True)
    assert list(found[window:]) == queue.waiting[window:]


def test_longest_prefix_matches_few_very_long_prompts() -> None:
    queue = Queue(100, 1, seed=2)
    queue.waiting = [replace(request, num_prompt_tokens=300_000) for request in queue.waiting]
    found = queue.ordered_by(LongestPrefixMatch())
    assert len(queue.num_calls) == 3
    assert list(found[3:]) == queue.waiting[3:]


def test_longest_output_first_breaks_ties_by_age() -> None:
    queue = Queue(200, 2, seed=3)
    found = queue.ordered_by(LongestOutputFirst())
    for one, next_one in pairwise(found):
        if one.priority == next_one.priority:
            assert one.max_tokens_left >= next_one.max_tokens_left
            assert one.max_tokens_left > next_one.max_tokens_left or one.arrival < next_one.arrival
    assert not queue.num_calls


class LeavesOneOut(Policy):
    def order(self, waiting: Waiting, running: Waiting, num_cached: NumCached) -> Waiting:
        return waiting[:49]


class TakesOneTwice(Policy):
    def order(self, waiting: Waiting, running: Waiting, num_cached: NumCached) -> Waiting:
        return [*waiting, *waiting[:1]]


class ForgetsPriorities(Policy):
    def order(self, waiting: Waiting, running: Waiting, num_cached: NumCached) -> Waiting:
        return sorted(waiting, key=lambda request: request.arrival)


class IsRandom(Policy):
    def order(self, waiting: Waiting, running: Waiting, num_cached: NumCached) -> Waiting:
        return sorted(waiting, key=lambda request: (request.priority, random.random()))


class RemembersCalls(Policy):
    def __init__(self) -> None:
        self._calls = 0

    def order(self, waiting: Waiting, running: Waiting, num_cached: NumCached) -> Waiting:
        self._calls += 1
        return sorted(waiting, key=lambda request: (request.priority, request.arrival * (-1) ** self._calls))


class CallsNumCachedPerComparison(Policy):
    def order(self, waiting: Waiting, running: Waiting, num_cached: NumCached) -> Waiting:
        def compare(one: RequestView, other: RequestView) -> int:
            first = (one.priority, -num_cached(one), one.arrival)
            return -1 if first < (other.priority, -num_cached(other), other.arrival) else 1

        return sorted(waiting, key=cmp_to_key(compare))


class ReturnsAnIterator(Policy):
    def order(self, waiting: Waiting, running: Waiting, num_cached: NumCached) -> Any:
        return reversed(waiting)


@pytest.mark.parametrize(
    ("broken", "caught_by"),
    [
        (ReturnsAnIterator, "test_order_has_each_waiting_request_once"),
        (LeavesOneOut, "test_order_has_each_waiting_request_once"),
        (TakesOneTwice, "test_order_has_each_waiting_request_once"),
        (ForgetsPriorities, "test_lower_priorities_run_first"),
        (IsRandom, "test_order_is_deterministic"),
        (RemembersCalls, "test_order_is_deterministic"),
        (CallsNumCachedPerComparison, "test_num_cached_is_called_once_per_request"),
    ],
)
def test_the_kit_catches_broken_policies(broken: type[Policy], caught_by: str) -> None:
    kit = type("Kit", (PolicyTests,), {"provider": broken})()
    assert next(iter_failures(kit, caught_by), None)
