"""Contract of prefix caches, which map prefixes of prompts to KV pages."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]
"""Token ids, shape [num_tokens]."""
PageIds = npt.NDArray[np.int32]
"""Page ids of the KV pool, shape [num_pages]."""


class CacheNamespace(NamedTuple):
    """Namespace of prefixes. Prompts in different namespaces do not share KV, even if their tokens are equal.

    Attributes:
        salt: salt of a client; requests with different salts share no KV.
        adapter_id: the adapter that computes the KV; empty for the base model.
    """

    salt: str = ""
    adapter_id: str = ""


DEFAULT_NAMESPACE = CacheNamespace()
"""Namespace of requests without salt and adapter."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Longest cached prefix of a prompt.

    Attributes:
        pages: page ids of the prefix in order, shape [num_pages]; a copy.
        handle: opaque handle of exactly this prefix, for `lock` and `unlock`. An empty match has one too, which covers no
            page.
    """

    pages: PageIds
    handle: Any


@dataclass(frozen=True, slots=True)
class PrefixInsert:
    """Result of inserting pages into a cache.

        offered   [0 ........ num_present) [num_present .. len(pages)) [len(pages) .. end)
        cached    before the call          by this call                no
        owner     cache                    cache                       caller

    An offered page in ``[0, num_present)`` whose id differs from that in `pages` is a duplicate. The cache did not take it, and
    the caller still owns it. Readers of a duplicate must move to `pages` before the caller frees it. A cache may take only some
    of the offered pages, or none.

    Attributes:
        pages: pages of the cached part of the prefix, in order, shape [num_cached_pages]; a copy.
        num_present: number of these pages that were cached before the call.
        handle: handle of the prefix in `pages`, for `lock` and `unlock`, as in `PrefixMatch`.
    """

    pages: PageIds
    num_present: int
    handle: Any


@dataclass(frozen=True, slots=True)
class PrefixTreeNode:
    """Node of a cache's prefix tree, for display: consecutive cached pages. A radix cache returns its radix tree's nodes.

    Attributes:
        node_id: id of the node while it is cached, at least 1.
        parent_id: id of the node before it; 0 if it is the beginning of a prompt.
        token_ids: its tokens, shape [num_pages * page_size]; read-only.
        pages: its pages in order, shape [num_pages], at least one; read-only.
        num_locks: number of locks on it.
        num_hits: calls of `count_hit` for a prefix that contains it.
        last_hit_s: time of the last such call, or of its insertion, by ``time.monotonic()``.
        namespace: namespace of a node at the beginning of a prompt; other nodes have the namespace of their parent.
    """

    node_id: int
    parent_id: int
    token_ids: TokenIds
    pages: PageIds
    num_locks: int
    num_hits: int
    last_hit_s: float
    namespace: CacheNamespace = DEFAULT_NAMESPACE


class PrefixCache(ABC):
    """Map from token prefixes, each in a namespace, to pages of the KV pool.

    Prefixes in different namespaces are unrelated, even if their tokens are equal. Token ids go up to 2^31 - 1. Two prefixes
    are equal if all their tokens are equal, so a cache with hashes must compare the tokens too.

    Pages enter the cache only by `insert` and leave it only by `evict`, whose results report them. The hooks ``pages_cached``
    and ``pages_evicted`` pass these results on.

    Only whole pages are cached. A page belongs to exactly one owner: the free list, a request or the cache. Insert moves pages
    from a request to the cache. Evict moves them from the cache to the caller, which frees them. A locked prefix is never
    evicted, and a page is never evicted before the pages that follow it in a prefix. All calls run on one thread, on the CPU,
    and never access the KV data.

    A locked handle stays valid through all matches, insertions and evictions. Without a lock it is valid until the next
    `evict`. The handle of an empty prefix is always valid, and locking it has no effect.

    Sizes are in pages. ``num_evictable + num_locked == num_pages`` always holds.
    """

    plugin_api: ClassVar[str] = ">=2,<3"

    def __init__(self, page_size: int) -> None:
        """Create an empty cache. `page_size`: tokens per page, at least 1."""
        self.page_size = page_size

    @abstractmethod
    def match(self, token_ids: TokenIds, namespace: CacheNamespace = DEFAULT_NAMESPACE) -> PrefixMatch:
        """Return the longest cached prefix of `token_ids` in a namespace, in whole pages.

        This changes no size and locks nothing, so lock the handle before the next eviction. It may update recency.
        """

    @abstractmethod
    def insert(
        self, token_ids: TokenIds, pages: PageIds, namespace: CacheNamespace = DEFAULT_NAMESPACE
    ) -> PrefixInsert:
        """Insert pages with the KV of a prefix.

        Inserted pages have no lock, and the whole cached prefix counts as used now. The caller keeps the arrays and may change
        them afterwards.

        Args:
            token_ids: shape [num_tokens]; tokens past the last whole page are ignored.
            pages: shape [num_pages]; page i has tokens ``[i * page_size, (i + 1) * page_size)``. Pages beyond the whole pages
                of `token_ids` are ignored and stay the caller's. Each page is the caller's own, or the cached page at the same
                index of the prefix, from a match that is still locked.
            namespace: namespace of the request that computed the pages.
        """

    @abstractmethod
    def lock(self, handle: Any) -> None:
        """Protect the prefix of `handle` from eviction until `unlock`. Locks are counted: two locks need two unlocks."""

    @abstractmethod
    def unlock(self, handle: Any) -> None:
        """Undo one `lock`. The prefix counts as used now."""

    @abstractmethod
    def evict(self, num_pages: int) -> PageIds:
        """Evict at least `num_pages` unlocked pages, least recently used first, and return their ids.

        It may evict more pages if the cache evicts in larger units, but none for 0.

        Raises:
            CacheFullError: fewer than `num_pages` pages are evictable; nothing is evicted.
        """

    @property
    @abstractmethod
    def num_evictable(self) -> int:
        """Pages that `evict` could return now."""

    @property
    @abstractmethod
    def num_locked(self) -> int:
        """Pages that a lock protects."""

    @property
    def num_pages(self) -> int:
        """Pages that the cache owns."""
        return self.num_evictable + self.num_locked

    def count_hit(self, handle: Any) -> None:
        """Count a request that reuses the prefix of `handle`, which is locked. For statistics only."""

    def nodes(self, max_nodes: int) -> list[PrefixTreeNode]:
        """Return the nodes of the prefix tree, for display. Parents come before their children.

        If there are more than `max_nodes` nodes, locked nodes come first and then the most recently used ones, always with
        their parents. The cost must not grow with the size of the cache. The default returns no nodes.
        """
        return []

    @abstractmethod
    def check(self) -> None:
        """Verify the whole structure, and raise AssertionError with the first error found. O(size); for tests."""
