"""Conformance kit of prefix caches."""

import time
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from minisgl_core.contracts.prefix_cache import CacheNamespace, PrefixCache
from minisgl_core.testing.prefix_cache_machine import PrefixCacheMachine, pages_array, tokens_of
from minisgl_core.testing.similar_pages import similar_pages

each_page_size = pytest.mark.parametrize("page_size", [1, 4, 16])


class PrefixCacheTests:
    """Tests of a prefix cache. Subclass this and set `provider`.

    Attributes:
        takes_all: True if `insert` takes all whole pages that are not cached yet. If False, the only test is that
            of random sequences of calls.
        evicts_least_recent: True if the least recently used pages are evicted first. Set it to False for a cache that evicts in
            larger units, or by another rule.
        profile: settings of hypothesis, which searches for failing sequences of calls.
    """

    provider: ClassVar[type[PrefixCache]]
    takes_all: ClassVar[bool] = True
    evicts_least_recent: ClassVar[bool] = True
    profile: ClassVar[settings] = settings(
        max_examples=50,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )

    def make_cache(self, page_size: int) -> PrefixCache:
        """Return an empty cache. Override it if the class takes more arguments."""
        return self.provider(page_size)

    def filled(self, page_size: int, *prefixes: tuple[int, ...]) -> PrefixCache:
        """Return a cache with these prefixes, inserted in order. Pages of the first are 10, 11, ..., of the second 20, 21, ..."""
        if not self.takes_all:
            pytest.skip("the cache does not take all pages")
        cache = self.make_cache(page_size)
        for index, prefix in enumerate(prefixes, start=1):
            cache.insert(tokens_of(prefix, page_size), pages_array([10 * index + page for page in range(len(prefix))]))
        return cache

    @each_page_size
    def test_agrees_with_a_dictionary(self, page_size: int) -> None:
        """The cache agrees with a dictionary model in random sequences of calls; see `PrefixCacheMachine`."""
        machine: Any = partial(PrefixCacheMachine, self.make_cache, page_size, self.takes_all, self.evicts_least_recent)
        run_state_machine_as_test(machine, settings=self.profile)

    @pytest.mark.parametrize("page_size", [1, 2, 16])
    def test_similar_pages_are_distinguished(self, page_size: int) -> None:
        """Pages that differ in one bit or have equal checksums are distinguished, among thousands of cached pages."""
        pages = similar_pages(page_size)
        for beginning in (np.empty(0, np.int32), np.arange(page_size, dtype=np.int32)):
            cache = self.filled(page_size)
            num_before = len(beginning) // page_size
            ids = {page.tobytes(): number for number, page in enumerate(pages, start=2)}
            for page in pages:
                tokens = np.concatenate((beginning, page))
                assert len(cache.match(tokens).pages) <= num_before, "the cache found a page that was never inserted"
                cache.insert(tokens, pages_array([1] * num_before + [ids[page.tobytes()]]))
            for page in pages:
                matched = cache.match(np.concatenate((beginning, page))).pages.tolist()
                assert matched == [1] * num_before + [ids[page.tobytes()]], "the cache found other pages"
            cache.check()

    @each_page_size
    def test_namespaces_share_nothing(self, page_size: int) -> None:
        """Salts and adapters separate prefixes; sizes and eviction cover all namespaces."""
        cache, tokens = self.filled(page_size), tokens_of((0, 1), page_size)
        pairs = (("", ""), ("a", ""), ("", "a"), ("ab", "c"), ("a", "bc"))
        namespaces = [CacheNamespace(*pair) for pair in pairs]
        for number, namespace in enumerate(namespaces):
            assert len(cache.match(tokens, namespace).pages) == 0, "the cache found a prefix of another namespace"
            inserted = cache.insert(tokens, pages_array([10 * number + 10, 10 * number + 11]), namespace)
            assert (inserted.num_present, len(inserted.pages)) == (0, 2)
        for number, namespace in enumerate(namespaces):
            assert cache.match(tokens, namespace).pages.tolist() == [10 * number + 10, 10 * number + 11]
        assert cache.match(tokens).pages.tolist() == [10, 11], "a match without a namespace must use the default one"
        assert len(cache.match(tokens, CacheNamespace("other")).pages) == 0
        if type(cache).nodes is not PrefixCache.nodes:
            assert {node.namespace for node in cache.nodes(100) if node.parent_id == 0} == set(namespaces)
        cache.lock(cache.match(tokens, namespaces[1]).handle)
        assert (cache.num_locked, cache.num_evictable) == (2, 8)
        assert sorted(cache.evict(8).tolist()) == [10, 11, *range(30, 32), *range(40, 42), *range(50, 52)]
        assert cache.match(tokens, namespaces[1]).pages.tolist() == [20, 21]
        assert len(cache.match(tokens, namespaces[3]).pages) == 0
        cache.insert(tokens, pages_array([60, 61]), namespaces[3])
        assert cache.match(tokens, namespaces[3]).pages.tolist() == [60, 61]
        cache.check()

    @each_page_size
    def test_nodes_are_bounded_and_count_hits(self, page_size: int) -> None:
        """`nodes` returns locked nodes and their parents first; `count_hit` counts for the whole prefix."""
        cache = self.filled(page_size, (0, 0, 0), (0, 0, 1), *[(2, index % 3, index // 3) for index in range(9)])
        if type(cache).nodes is PrefixCache.nodes:
            pytest.skip("the cache returns no nodes")
        everything = cache.nodes(1000)
        assert sum(len(node.token_ids) for node in everything) == cache.num_pages * page_size
        assert len(cache.nodes(0)) == 0
        handle = cache.match(tokens_of((0, 0), page_size)).handle
        cache.lock(handle)
        cache.count_hit(handle)
        cache.count_hit(handle)
        shown = cache.nodes(2)
        assert len(shown) == 2
        locked = next(node for node in shown if node.num_locks)
        assert locked.pages.tolist() in ([10], [10, 11])
        for node in cache.nodes(1000):
            assert node.num_hits == (2 if 10 <= node.pages[0] <= 11 else 0)
            assert node.last_hit_s <= time.monotonic()

    def test_a_long_chain_of_prefixes(self) -> None:
        """A prefix with a cached prefix at each page is matched, locked and evicted, without recursion per page."""
        num_pages = 1002  # more than the recursion limit
        cache = self.filled(1)
        tokens, pages = tokens_of((0, 1, 2) * (num_pages // 3), 1), list(range(num_pages))
        for length in range(num_pages, 0, -1):
            cache.insert(tokens[:length], pages_array(pages[:length]))
        cache.check()
        match = cache.match(tokens)
        assert match.pages.tolist() == pages
        cache.lock(match.handle)
        assert cache.num_locked == num_pages
        cache.unlock(match.handle)
        assert sorted(cache.evict(num_pages).tolist()) == pages
        cache.check()
