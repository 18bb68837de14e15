"""The extension point for prefix caches: which pages of KV already hold the beginning of a prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]
"""Token ids, shape [num_tokens]."""
PageIds = npt.NDArray[np.int32]
"""Page ids of the KV pool, shape [num_pages]."""


class CacheNamespace(NamedTuple):
    """Separates prompts whose KV must not be shared although their tokens are equal.

    Attributes:
        salt: a client's own; requests with different salts share nothing.
        adapter_id: the adapter that computes the KV; empty for the model itself.
    """

    salt: str = ""
    adapter_id: str = ""


DEFAULT_NAMESPACE = CacheNamespace()
"""The namespace of requests without a salt or an adapter."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What a cache knows about a prompt.

    Attributes:
        pages: ids of the pages that hold the longest cached prefix, in order, shape [num_pages]; a copy.
        handle: the cache's own mark of exactly that prefix, for `lock` and `unlock`; opaque to callers. An empty match
            has one too, which covers no page.
    """

    pages: PageIds
    handle: Any

    def num_tokens(self, page_size: int) -> int:
        """Tokens that the match covers."""
        return len(self.pages) * page_size


@dataclass(frozen=True, slots=True)
class PrefixInsert:
    """What became of pages offered to a cache.

        offered   [0 ........ num_present) [num_present .. len(pages)) [len(pages) .. end)
        cached    before the call          by this call                not at all
        owner     cache, or the caller     the cache now               the caller still
                  where the ids differ

    An offered page in ``[0, num_present)`` whose id differs from that in `pages` is a duplicate: the cache did not take
    it, the caller still owns it, and whoever still reads through it must move to `pages` before freeing it. A cache may
    take less than it was offered, or nothing.

    Attributes:
        pages: the pages that hold the part of the prefix that is cached now, in order, shape [num_cached_pages]; a copy.
        num_present: how many of them were cached before the call.
        handle: mark of the prefix that `pages` hold, for `lock` and `unlock`, as in `PrefixMatch`.
    """

    pages: PageIds
    num_present: int
    handle: Any


@dataclass(frozen=True, slots=True)
class CachedRun:
    """A run of cached pages that were used alike, for people to look at; the runs of a cache form a tree.

    Attributes:
        number: a name that stays the same while the run is cached, at least 1.
        parent: number of the run before it; 0 where it begins a prompt.
        token_ids: its tokens, shape [num_pages * page_size]; not to be changed.
        pages: its pages, in order, shape [num_pages], at least one; not to be changed.
        num_locks: locks that protect it.
        num_hits: calls of `count_hit` for a prefix that contains it.
        last_hit_s: when the last of them was, or else when it was inserted, in ``time.monotonic()``.
        namespace: of a run that begins a prompt; every other run is in the namespace of the run that it continues.
    """

    number: int
    parent: int
    token_ids: TokenIds
    pages: PageIds
    num_locks: int
    num_hits: int
    last_hit_s: float
    namespace: CacheNamespace = DEFAULT_NAMESPACE


class PrefixCache(ABC):
    """Maps token prefixes, each in a namespace, to pages of the KV pool.

    Prefixes of different namespaces have nothing in common, however alike their tokens are. Token ids go up to 2^31 - 1; two
    prefixes are equal where all their tokens are, so a cache that hashes them compares them as well.

    What `insert` and `evict` return is the cache's report: nothing enters or leaves the cache but by them and by `reset`. The
    hooks ``pages_cached`` and ``pages_evicted`` pass it on.

    Only whole pages are cached. A page belongs to exactly one of: the free list, a request, the cache. Insert moves
    pages from a request to the cache, evict moves them from the cache to the caller, who frees them. A locked prefix is
    never evicted, and a page is never evicted before the pages that follow it in a prefix. All calls run on one thread,
    on the CPU, and never touch the KV data itself.

    A handle stays good while it is locked, whatever else is matched, inserted or evicted; without a lock, until the
    next `evict` or `reset`. That of an empty prefix is always good, and locking it does nothing.

    Sizes are in pages. ``num_evictable + num_locked == num_pages`` always holds.
    """

    plugin_api: ClassVar[str] = ">=2,<3"

    def __init__(self, page_size: int) -> None:
        """Start empty. `page_size`: tokens per page, at least 1."""
        self.page_size = page_size

    @abstractmethod
    def match(self, token_ids: TokenIds, namespace: CacheNamespace = DEFAULT_NAMESPACE) -> PrefixMatch:
        """Find the longest cached prefix of `token_ids` in a namespace, in whole pages.

        Changes no size and locks nothing: lock the handle before anything else may evict. May refresh recency.
        """

    @abstractmethod
    def insert(
        self, token_ids: TokenIds, pages: PageIds, namespace: CacheNamespace = DEFAULT_NAMESPACE
    ) -> PrefixInsert:
        """Offer pages that hold the KV of a prefix.

        What is taken comes without a lock; all that is cached of the prefix counts as used now. The arrays stay the
        caller's, who may change them afterwards.

        Args:
            token_ids: shape [num_tokens]; tokens past the last whole page are ignored.
            pages: shape [num_pages]; page i holds tokens ``[i * page_size, (i + 1) * page_size)``. May be longer than
                the whole pages of `token_ids`; the surplus is ignored and stays the caller's. Each page is either the
                caller's own or the very page that the cache has at that place of the prefix (from a match that is still
                locked).
            namespace: of the request that computed them.
        """

    @abstractmethod
    def lock(self, handle: Any) -> None:
        """Keep the prefix behind `handle` from eviction, until `unlock`. Locks count: two locks need two unlocks."""

    @abstractmethod
    def unlock(self, handle: Any) -> None:
        """Undo one `lock`. The prefix counts as used now."""

    @abstractmethod
    def evict(self, num_pages: int) -> PageIds:
        """Give up at least `num_pages` unlocked pages, least recently used first, and return their ids.

        May return more than asked for, where the cache frees in larger units; nothing for 0.

        Raises:
            CacheFullError: fewer than `num_pages` pages are evictable; nothing is evicted then.
        """

    @property
    @abstractmethod
    def num_evictable(self) -> int:
        """Pages that `evict` could free now."""

    @property
    @abstractmethod
    def num_locked(self) -> int:
        """Pages that a lock protects."""

    @property
    def num_pages(self) -> int:
        """Pages that the cache owns."""
        return self.num_evictable + self.num_locked

    def count_hit(self, handle: Any) -> None:
        """Note that a request has begun after the prefix behind `handle`, which is locked: for statistics alone."""

    def runs(self, max_runs: int) -> list[CachedRun]:
        """What is cached, as a tree, for people to look at; parents come before their children.

        Of more than `max_runs` runs, locked ones go first, then those used most recently; what they continue is always
        there. Must not cost more in a large cache than in a small one. By default there is nothing to show.
        """
        return []

    @abstractmethod
    def reset(self) -> Sequence[int]:
        """Forget everything and return the ids of all pages owned. No page may be locked."""

    @abstractmethod
    def check(self) -> None:
        """Verify the whole structure and raise AssertionError naming the first thing wrong. O(size); for tests."""
