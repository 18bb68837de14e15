"""Random sequences of calls of a prefix cache, compared with a dictionary after each call."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minisgl_core.contracts.prefix_cache import PageIds, PrefixCache, TokenIds
from minisgl_core.errors import CacheFullError

Prefix = tuple[int, ...]
"""A prefix with one symbol per page."""

NUM_PAGES = 48
"""Pages of the pool, including the padding page 0, which no cache gets."""

SYMBOLS = st.sampled_from([0, 0, 0, 1, 2])
"""Symbols with uneven frequencies, so that prompts often share a prefix."""

PREFIXES = st.integers(0, 7).flatmap(lambda size: st.tuples(*[SYMBOLS] * size))


def tokens_of(prefix: Prefix, page_size: int, num_extra: int = 0) -> TokenIds:
    """Return the tokens of a prefix, and `num_extra` more.

    Symbols 0 and 1 differ only in the page's last token, 0 and 2 only in its first; the extra tokens begin like symbol 0.
    """
    tokens = np.zeros((len(prefix) + 1, page_size), np.int32)
    for page, symbol in enumerate(prefix):
        tokens[page, -1 if symbol == 1 else 0] = symbol
    return tokens.reshape(-1)[: len(prefix) * page_size + num_extra]


def pages_array(pages: list[int]) -> PageIds:
    """Return page ids with the contract's type."""
    return np.array(pages, np.int32)


class PrefixCacheMachine(RuleBasedStateMachine):
    """State machine that calls a prefix cache as the engine does, and knows the owner of each page of the pool.

    Attributes:
        free: pages that the cache does not own.
        cached: last page of each cached prefix.
    """

    def __init__(
        self, make_cache: Callable[[int], PrefixCache], page_size: int, takes_all: bool, evicts_least_recent: bool
    ) -> None:
        super().__init__()
        self.cache = make_cache(page_size)
        self.page_size, self.takes_all, self.evicts_least_recent = page_size, takes_all, evicts_least_recent
        self.free = list(range(1, NUM_PAGES))
        self.cached: dict[Prefix, int] = {}
        self.handles: list[tuple[Any, Prefix]] = []
        """Valid handles and their prefixes."""
        self.locks: list[tuple[Any, Prefix]] = []
        self.now = 0
        self.surely_used: dict[Prefix, int] = {}
        """Time when a prefix was last inserted or unlocked."""
        self.maybe_used: dict[Prefix, int] = {}
        """Time of the last use, including matches and locks, which a cache may ignore."""

    def beginnings(self, prefix: Prefix) -> list[Prefix]:
        """Return all non-empty prefixes of `prefix`, shortest first."""
        return [prefix[:length] for length in range(1, len(prefix) + 1)]

    def longest_cached(self, prefix: Prefix) -> Prefix:
        return max((part for part in self.beginnings(prefix) if part in self.cached), key=len, default=())

    def pages_of(self, prefix: Prefix) -> list[int]:
        return [self.cached[part] for part in self.beginnings(prefix)]

    def locked(self) -> set[Prefix]:
        return {part for _, prefix in self.locks for part in self.beginnings(prefix)}

    def use(self, prefix: Prefix, surely: bool) -> None:
        self.now += 1
        for part in self.beginnings(prefix):
            self.maybe_used[part] = self.now
            if surely:
                self.surely_used[part] = self.now

    def hold(self, handle: Any, prefix: Prefix, lock: bool) -> None:
        """Store a valid handle, and lock it if `lock`."""
        self.handles.append((handle, prefix))
        if lock:
            self.cache.lock(handle)
            self.locks.append((handle, prefix))
            self.use(prefix, surely=False)

    @rule(prefix=PREFIXES, num_extra=st.integers(0, 15), lock=st.booleans())
    def match(self, prefix: Prefix, num_extra: int, lock: bool) -> None:
        """`match` returns the longest cached prefix, and sizes do not change."""
        sizes = self.cache.num_evictable, self.cache.num_locked
        result = self.cache.match(tokens_of(prefix, self.page_size, num_extra % self.page_size))
        assert (self.cache.num_evictable, self.cache.num_locked) == sizes, "match changed a size"
        part = self.longest_cached(prefix)
        assert result.pages.tolist() == self.pages_of(part), "match returned other pages"
        result.pages[:] = -1  # the caller's copy
        self.use(part, surely=False)
        self.hold(result.handle, part, lock)

    @rule(
        prefix=PREFIXES,
        num_extra=st.integers(0, 15),
        num_reused=st.integers(0, 7),
        num_surplus=st.integers(0, 2),
        lock=st.booleans(),
    )
    def insert(self, prefix: Prefix, num_extra: int, num_reused: int, num_surplus: int, lock: bool) -> None:
        """Insert a prefix with up to `num_reused` pages of the cache, then new ones, `num_surplus` more than the prefix needs."""
        present = self.longest_cached(prefix)
        reused = self.pages_of(present)[:num_reused]
        num_own = len(prefix) - len(reused) + num_surplus
        if num_own > len(self.free):
            return
        own, self.free = self.free[:num_own], self.free[num_own:]
        tokens = tokens_of(prefix, self.page_size, num_extra % self.page_size)
        offered = pages_array(reused + own)
        result = self.cache.insert(tokens, offered)
        num_cached = len(result.pages)
        assert result.num_present == len(present), "num_present is wrong"
        assert len(present) <= num_cached <= len(prefix), "insert took too many pages or lost some"
        assert num_cached == len(prefix) or not self.takes_all, "insert did not take all pages"
        pages = self.pages_of(present) + offered[len(present) : num_cached].tolist()
        assert result.pages.tolist() == pages, "insert returned other pages"
        self.cached.update(zip(self.beginnings(prefix), pages, strict=False))
        self.free += [page for page in own if page not in pages]
        tokens[:], offered[:], result.pages[:] = -1, -1, -1  # the cache must have copied them
        self.use(prefix[:num_cached], surely=True)
        self.hold(result.handle, prefix[:num_cached], lock)

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def lock(self, data: st.DataObject) -> None:
        handle, prefix = data.draw(st.sampled_from(self.handles))
        self.hold(handle, prefix, lock=True)

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        handle, prefix = self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1)))
        self.cache.unlock(handle)
        self.use(prefix, surely=True)

    @rule(num_pages=st.integers(0, 9))
    def evict(self, num_pages: int) -> None:
        """Evict pages, or check that evicting more pages than are evictable raises an error."""
        if num_pages <= len(self.cached) - len(self.locked()):
            self.check_evicted(self.cache.evict(num_pages), num_pages)
            return
        with pytest.raises(CacheFullError):
            self.cache.evict(num_pages)

    def check_evicted(self, pages: PageIds, num_asked: int) -> None:
        """Check the evicted pages, and move them to the free ones."""
        owner = {page: prefix for prefix, page in self.cached.items()}
        evicted = [owner[page] for page in pages.tolist() if page in owner]
        assert len(evicted) == len(pages), "a page that the cache did not own was evicted"
        assert len(set(evicted)) == len(evicted), "a page was evicted twice"
        assert len(evicted) >= num_asked, "too few pages were evicted"
        assert not self.locked().intersection(evicted), "a locked page was evicted"
        for prefix in evicted:
            del self.cached[prefix]
        self.free += pages.tolist()
        for prefix in self.cached:
            assert len(prefix) == 1 or prefix[:-1] in self.cached, "a page was evicted before one that follows it"
        kept = self.cached.keys() - self.locked()
        if self.evicts_least_recent and kept and evicted:
            oldest_kept = min(self.maybe_used[prefix] for prefix in kept)
            assert all(self.surely_used[prefix] <= oldest_kept for prefix in evicted), (
                "a page was evicted before one that was used earlier"
            )
        # An eviction invalidates all handles that are not locked, except for those of the empty prefix.
        self.handles = [*self.locks, *((handle, prefix) for handle, prefix in self.handles if not prefix)]

    @invariant()
    def sizes_and_structure_are_right(self) -> None:
        """Sizes equal those of the dictionary, and `check` passes."""
        num_locked = len(self.locked())
        assert self.cache.num_locked == num_locked, "num_locked is wrong"
        assert self.cache.num_evictable == len(self.cached) - num_locked, "num_evictable is wrong"
        assert self.cache.num_pages == len(self.cached), "num_pages is wrong"
        assert sorted([*self.free, *self.cached.values()]) == list(range(1, NUM_PAGES)), "a page is lost or owned twice"
        self.cache.check()

    @invariant()
    def nodes_are_right(self) -> None:
        """`nodes` returns exactly the cached prefixes if the cache implements it."""
        if type(self.cache).nodes is PrefixCache.nodes:
            return
        tokens, pages = {0: tokens_of((), self.page_size)}, {0: pages_array([])}
        shown = {}
        num_locked = 0
        for node in self.cache.nodes(NUM_PAGES):
            assert node.parent_id in pages, "a node comes before its parent"
            assert node.node_id not in pages, "two nodes have one id"
            tokens[node.node_id] = np.concatenate((tokens[node.parent_id], node.token_ids))
            pages[node.node_id] = np.concatenate((pages[node.parent_id], node.pages))
            for end in range(len(pages[node.parent_id]) + 1, len(pages[node.node_id]) + 1):
                shown[tokens[node.node_id][: end * self.page_size].tobytes()] = int(pages[node.node_id][end - 1])
            num_locked += len(node.pages) if node.num_locks else 0
        cached = {tokens_of(prefix, self.page_size).tobytes(): page for prefix, page in self.cached.items()}
        assert shown == cached, "the nodes differ from the cached prefixes"
        assert num_locked == self.cache.num_locked, "the locks of the nodes are wrong"

    def teardown(self) -> None:
        """Check at the end that all cached prefixes are matched and can be evicted."""
        for prefix in list(self.cached):
            self.match(prefix, num_extra=0, lock=False)
        while self.locks:
            handle, _ = self.locks.pop()
            self.cache.unlock(handle)
        self.evicts_least_recent = False
        self.check_evicted(self.cache.evict(self.cache.num_evictable), len(self.cached))
        self.sizes_and_structure_are_right()
        assert not self.cached, "pages are left after evicting all"
