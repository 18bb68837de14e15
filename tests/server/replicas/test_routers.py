"""Routers: the kit, broken routers, the policies, and ``prefix`` compared with a naive reference."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit_runner import iter_failures

from minisgl_core.contracts.prefix_cache import CacheNamespace
from minisgl_core.contracts.router import (
    BlockKeys,
    ReplicaView,
    RoutedPrompt,
    Router,
    RouterSpec,
    block_keys,
    block_size_for,
)
from minisgl_core.testing.router_kit import Replica, RouterTests, prompt
from minisgl_server.router.block_table import WAYS, BlockTable
from minisgl_server.router.policies import LeastLoadedRouter, RoundRobinRouter
from minisgl_server.router.prefix import NEW_TOKEN_COST, PrefixRouter


class TestRoundRobin(RouterTests):
    provider = RoundRobinRouter


class TestLeastLoaded(RouterTests):
    provider = LeastLoadedRouter


class TestPrefix(RouterTests):
    provider = PrefixRouter


class AlwaysFirst(Router):
    def route(self, prompt: RoutedPrompt, replicas: Sequence[ReplicaView]) -> int:
        return replicas[0].replica


class ReturnsAnIndex(RoundRobinRouter):
    """Returns an index into the ready replicas, not a replica number."""

    def route(self, prompt: RoutedPrompt, replicas: Sequence[ReplicaView]) -> int:
        return super().route(prompt, [Replica(index) for index in range(len(replicas))])


class IsRandom(Router):
    def route(self, prompt: RoutedPrompt, replicas: Sequence[ReplicaView]) -> int:
        return random.SystemRandom().choice(replicas).replica


class KeepsAllKeys(RoundRobinRouter):
    """Keeps the keys of all events."""

    uses_events: ClassVar[bool] = False

    def __init__(self, spec: RouterSpec) -> None:
        super().__init__(spec)
        self.keys: set[int] = set()

    def inserted(self, replica: int, keys: BlockKeys) -> None:
        self.keys.update(keys.tolist())


class ChangesLoads(LeastLoadedRouter):
    """Changes the load that it is given."""

    def route(self, prompt: RoutedPrompt, replicas: Sequence[Any]) -> int:
        chosen = super().route(prompt, replicas)
        next(each for each in replicas if each.replica == chosen).num_requests += 1
        return chosen


class IgnoresEvents(LeastLoadedRouter):
    uses_events: ClassVar[bool] = True


class IgnoresLostReplicas(PrefixRouter):
    def lost(self, replica: int) -> None:
        pass


class IgnoresEvictions(PrefixRouter):
    def evicted(self, replica: int, keys: BlockKeys) -> None:
        pass


class IgnoresNamespaces(PrefixRouter):
    def route(self, prompt: RoutedPrompt, replicas: Sequence[ReplicaView]) -> int:
        return super().route(RoutedPrompt(prompt.token_ids, prompt.block_size), replicas)


class AvoidsLostReplicas(RoundRobinRouter):
    """Never uses a replica again that was lost."""

    def __init__(self, spec: RouterSpec) -> None:
        super().__init__(spec)
        self.bad: set[int] = set()

    def lost(self, replica: int) -> None:
        self.bad.add(replica)

    def route(self, prompt: RoutedPrompt, replicas: Sequence[ReplicaView]) -> int:
        return super().route(prompt, [each for each in replicas if each.replica not in self.bad] or replicas)


class NumpyResult(RoundRobinRouter):
    def route(self, prompt: RoutedPrompt, replicas: Sequence[ReplicaView]) -> Any:
        return np.int64(super().route(prompt, replicas))


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (AlwaysFirst, "test_every_replica_gets_some"),
        (ReturnsAnIndex, "test_routes_to_a_replica_that_is_ready"),
        (IsRandom, "test_decisions_depend_on_the_calls_alone"),
        (KeepsAllKeys, "test_memory_is_bounded"),
        (ChangesLoads, "test_changes_no_argument"),
        (IgnoresEvents, "test_prefers_the_replica"),
        (IgnoresLostReplicas, "test_prefers_the_replica"),
        (IgnoresEvictions, "test_prefers_the_replica"),
        (IgnoresNamespaces, "test_prefixes_of_other_namespaces"),
        (AvoidsLostReplicas, "test_every_replica_gets_some"),
        (NumpyResult, "test_routes_to_a_replica_that_is_ready"),
    ],
)
def test_the_kit_catches_broken_routers(broken: type[Router], test: str) -> None:
    class Kit(RouterTests):
        provider = broken

    assert next(iter_failures(Kit(), test), None)


def spec(num_replicas: int = 3, **options: Any) -> RouterSpec:
    return RouterSpec(num_replicas, 4096, **options)


def test_round_robin_skips_replicas_that_are_not_ready() -> None:
    router = RoundRobinRouter(spec())
    assert [router.route(prompt(0), [Replica(0), Replica(1), Replica(2)]) for _ in range(4)] == [0, 1, 2, 0]
    assert [router.route(prompt(0), [Replica(0), Replica(2)]) for _ in range(3)] == [2, 0, 2]


def test_least_loaded_counts_requests_then_tokens() -> None:
    router = LeastLoadedRouter(spec())
    assert router.route(prompt(0), [Replica(0, 2, 5), Replica(1, 1, 900), Replica(2, 1, 800)]) == 2
    equal = [Replica(0, 3), Replica(1, 1), Replica(2, 1)]
    assert [router.route(prompt(0), equal) for _ in range(3)] == [1, 2, 1], "equally loaded replicas alternate"


@pytest.mark.parametrize(("held", "other", "expected"), [(20, 4, 0), (21, 4, 1), (48, 32, 0), (49, 32, 1)])
def test_prefixes_do_not_attract_requests_to_overloaded_replicas(held: int, other: int, expected: int) -> None:
    """Both thresholds must be passed: more than 16 requests above, and more than 1.5 times, the least loaded replica."""
    router = PrefixRouter(spec(2, overload_requests=16, overload_ratio=1.5))
    router.inserted(0, prompt(0).block_keys())
    assert router.route(prompt(0), [Replica(0, held), Replica(1, other)]) == expected


@pytest.mark.parametrize(("num_tokens", "expected"), [(NEW_TOKEN_COST * 192 - 1, 0), (NEW_TOKEN_COST * 192 + 1, 1)])
def test_prompt_tokens_outweigh_a_cached_prefix(num_tokens: int, expected: int) -> None:
    """The prompt has 12 whole blocks of 16 tokens. One long prompt loads a replica as much as many short ones."""
    router = PrefixRouter(spec(2))
    router.inserted(0, prompt(0).block_keys())
    assert router.route(prompt(0), [Replica(0, 1, num_tokens), Replica(1, 1, 0)]) == expected


def test_block_keys_depend_on_the_whole_prefix() -> None:
    tokens = np.arange(100, dtype=np.int32)
    keys = block_keys(tokens, 16)
    assert len(keys) == 6
    assert (block_keys(tokens[:50], 16) == keys[:3]).all()
    for changed in range(96):
        other = tokens.copy()
        other[changed] += 1
        same = block_keys(other, 16) == keys
        assert same.tolist() == [index < changed // 16 for index in range(6)]
    spaces = [CacheNamespace(), CacheNamespace("a"), CacheNamespace("", "a"), CacheNamespace("b"), CacheNamespace("ab")]
    assert len({int(block_keys(tokens, 16, space)[0]) for space in spaces}) == len(spaces)
    assert block_keys(np.zeros(160, np.int32), 16).tolist() == list(
        dict.fromkeys(block_keys(np.zeros(160, np.int32), 16).tolist())
    )
    assert [block_size_for(page_size) for page_size in (1, 3, 16, 64)] == [16, 18, 16, 64]


class NaiveRouter(Router):
    """Router with a set of prefixes, as tuples of tokens, per replica."""

    def __init__(self, spec: RouterSpec) -> None:
        super().__init__(spec)
        self.held: defaultdict[int, set[tuple[Any, ...]]] = defaultdict(set)
        self.balance = LeastLoadedRouter(spec)

    @staticmethod
    def prefixes(prompt: RoutedPrompt) -> list[tuple[Any, ...]]:
        tokens, size = prompt.token_ids.tolist(), prompt.block_size
        return [(prompt.namespace, *tokens[: (end + 1) * size]) for end in range(len(tokens) // size)]

    def num_held(self, prompt: RoutedPrompt, replica: int) -> int:
        lengths = [place for place, each in enumerate(self.prefixes(prompt), 1) if each in self.held[replica]]
        return max(lengths, default=0)

    def num_new(self, prompt: RoutedPrompt, replica: int) -> int:
        return len(prompt.token_ids) - prompt.block_size * self.num_held(prompt, replica)

    def route(self, prompt: RoutedPrompt, replicas: Sequence[ReplicaView]) -> int:
        least = min(each.num_requests for each in replicas)
        able = [
            each
            for each in replicas
            if each.num_requests - least <= self.spec.overload_requests
            or each.num_requests <= least * self.spec.overload_ratio
        ]
        work = {e.replica: e.num_prompt_tokens + NEW_TOKEN_COST * self.num_new(prompt, e.replica) for e in able}
        chosen = self.balance.route(prompt, [e for e in able if work[e.replica] == min(work.values())])
        self.held[chosen].update(self.prefixes(prompt))
        return chosen


PROMPTS = st.builds(
    lambda tokens, cut, salt: RoutedPrompt(np.repeat(np.array(tokens, np.int32), 4)[cut:], 4, CacheNamespace(salt)),
    st.lists(st.integers(0, 2), max_size=6),
    st.integers(0, 3),
    st.sampled_from(["", "s"]),
)
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["route", "route", "inserted", "evicted", "lost"]),
        PROMPTS,
        st.integers(0, 8),
        st.lists(st.tuples(st.integers(0, 40), st.integers(0, 999)), min_size=9, max_size=9),
        st.sets(st.integers(0, 8), min_size=1),
    ),
    max_size=40,
)


@pytest.mark.parametrize("stride", [1, 8])
@settings(max_examples=100, deadline=None)
@given(calls=CALLS)
def test_prefix_equals_a_naive_reference(stride: int, calls: list[Any]) -> None:
    """9 replicas need bit masks of two bytes, and 65 need two words. The table has room for all blocks."""
    num_replicas = 8 * stride + 1
    router, naive = PrefixRouter(spec(num_replicas)), NaiveRouter(spec(num_replicas))
    for call, request, replica, loads, ready in calls:
        replica *= stride
        if call == "route":
            replicas = [Replica(number * stride, *loads[number]) for number in sorted(ready)]
            found = router._table.find(request.block_keys())
            held = [naive.num_held(request, number) for number in range(num_replicas)]
            assert router._table.num_held(found).tolist() == held
            assert router.route(request, replicas) == naive.route(request, replicas)
        elif call == "lost":
            router.lost(replica)
            naive.held[replica].clear()
        elif call == "inserted":
            router.inserted(replica, request.block_keys())
            naive.held[replica].update(naive.prefixes(request))
        else:  # a cache evicts from the end of a prefix
            num = len(request.token_ids) // 8
            router.evicted(replica, request.block_keys()[num:])
            naive.held[replica] -= set(naive.prefixes(request)[num:])


def test_a_full_table_replaces_the_least_recently_used() -> None:
    table = BlockTable(WAYS // 2, 2)  # one set
    assert table.capacity == WAYS
    keys = np.arange(1, WAYS + 1, dtype=np.uint64)
    for key in keys:
        table.add(key[None], 0)
    table.add(keys[:1], 1)  # used again
    table.add(np.array([99], np.uint64), 0)
    assert [each.tolist() for each in table.find(keys)] == [[0, *range(2, WAYS)]] * 2
    size = table.num_bytes
    table.add(np.arange(100, 100 + 3 * WAYS, dtype=np.uint64), 1)
    assert len(table) == WAYS
    assert table.num_bytes == size
    table.remove_replica(0)
    table.remove_replica(1)
    assert len(table) == 0


def test_the_clock_of_the_table_may_overflow() -> None:
    """Times of use have 32 bits. An overflow keeps the order of recently used entries."""
    table = BlockTable(WAYS // 2, 1)  # one set
    table._now = 2**32 - WAYS
    keys = np.arange(1, WAYS + 1, dtype=np.uint64)
    for key in keys:
        table.add(key[None], 0)
    table.add(np.array([99, 100], np.uint64), 0)
    assert table.find(keys).indices.tolist() == list(range(2, WAYS))
