"""Prefix cache in one dictionary, which finds a page by the page before it and by its own tokens."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np

from minisgl_core.contracts.prefix_cache import (
    DEFAULT_NAMESPACE,
    CacheNamespace,
    PageIds,
    PrefixCache,
    PrefixInsert,
    PrefixMatch,
    TokenIds,
)
from minisgl_core.errors import CacheFullError


@dataclass(eq=False, slots=True)
class Entry:
    """Cached page. It is also the handle of the prefix that ends with this page.

    Attributes:
        key: entry of the page before it, or the namespace for the first page of a prompt; and the page's tokens as bytes.
        page: page id in the KV pool.
        num_children: number of entries whose `parent` is this one.
        num_locks: number of locks on prefixes that contain the page.
        last_used: value of the cache's clock at the last match, insertion or unlock of a prefix that contains the page.
    """

    key: tuple[Entry | CacheNamespace, bytes]
    page: int
    num_children: int = 0
    num_locks: int = 0
    last_used: int = 0

    @property
    def parent(self) -> Entry | None:
        """Entry of the page before it; None for the first page of a prompt."""
        return self.key[0] if isinstance(self.key[0], Entry) else None


class ExampleCache(PrefixCache):
    """Evicts the least recently used pages first. Each eviction scans all entries, which is slow for a large cache."""

    def __init__(self, page_size: int) -> None:
        """Create an empty cache."""
        super().__init__(page_size)
        self._entries: dict[tuple[Entry | CacheNamespace, bytes], Entry] = {}
        self._num_locked = 0
        self._clock = 0

    def _page_keys(self, token_ids: TokenIds) -> list[bytes]:
        whole = len(token_ids) // self.page_size * self.page_size
        pages = np.ascontiguousarray(token_ids[:whole], dtype=np.int32).reshape(-1, self.page_size)
        return [page.tobytes() for page in pages]

    def _find_path(self, keys: list[bytes], namespace: CacheNamespace) -> list[Entry]:
        """Return the entries of the longest cached prefix, and mark them as used."""
        self._clock += 1
        path: list[Entry] = []
        for key in keys:
            entry = self._entries.get((path[-1] if path else namespace, key))
            if entry is None:
                break
            entry.last_used = self._clock
            path.append(entry)
        return path

    def match(self, token_ids: TokenIds, namespace: CacheNamespace = DEFAULT_NAMESPACE) -> PrefixMatch:
        """Return the longest cached prefix."""
        path = self._find_path(self._page_keys(token_ids), namespace)
        return PrefixMatch(_page_ids(path), path[-1] if path else None)

    def insert(
        self, token_ids: TokenIds, pages: PageIds, namespace: CacheNamespace = DEFAULT_NAMESPACE
    ) -> PrefixInsert:
        """Insert the pages after the longest cached prefix."""
        keys = self._page_keys(token_ids)[: len(pages)]
        path = self._find_path(keys, namespace)
        num_present = len(path)
        for key, page in zip(keys[num_present:], pages[num_present:].tolist(), strict=False):
            parent = path[-1] if path else None
            entry = Entry((parent or namespace, key), page, last_used=self._clock)
            self._entries[entry.key] = entry
            if parent is not None:
                parent.num_children += 1
            path.append(entry)
        return PrefixInsert(_page_ids(path), num_present, path[-1] if path else None)

    def lock(self, handle: Any) -> None:
        """Lock every page of the prefix."""
        for entry in _path_to(handle):
            self._num_locked += entry.num_locks == 0
            entry.num_locks += 1

    def unlock(self, handle: Any) -> None:
        """Remove a lock from every page of the prefix, and mark the pages as used."""
        self._clock += 1
        for entry in _path_to(handle):
            assert entry.num_locks > 0, "unlocked more often than locked"
            entry.num_locks -= 1
            self._num_locked -= entry.num_locks == 0
            entry.last_used = self._clock

    def evict(self, num_pages: int) -> PageIds:
        """Evict unlocked entries without children, the least recently used first."""
        if num_pages > self.num_evictable:
            raise CacheFullError(f"{num_pages} pages to evict, {self.num_evictable} evictable")
        leaves = [
            (entry.last_used, entry.page, entry)
            for entry in self._entries.values()
            if entry.num_children == 0 and entry.num_locks == 0
        ]
        heapq.heapify(leaves)
        evicted: list[int] = []
        while len(evicted) < num_pages:
            _, page, entry = heapq.heappop(leaves)
            del self._entries[entry.key]
            evicted.append(page)
            parent = entry.parent
            if parent is not None:
                parent.num_children -= 1
                if parent.num_children == 0 and parent.num_locks == 0:
                    heapq.heappush(leaves, (parent.last_used, parent.page, parent))
        return np.array(evicted, dtype=np.int32)

    @property
    def num_evictable(self) -> int:
        """Number of pages without a lock. All pages after them are unlocked, too, because a lock covers whole prefixes."""
        return len(self._entries) - self._num_locked

    @property
    def num_locked(self) -> int:
        """Number of pages with a lock."""
        return self._num_locked

    def check(self) -> None:
        """Verify keys, links and counters."""
        children = dict.fromkeys(self._entries.values(), 0)
        for key, entry in self._entries.items():
            assert entry.key == key, "an entry is stored under another key"
            if entry.parent is not None:
                assert entry.parent in children, "the parent of an entry was evicted"
                assert entry.parent.num_locks >= entry.num_locks, "a page has fewer locks than the page after it"
                children[entry.parent] += 1
        for entry, count in children.items():
            assert entry.num_children == count, "num_children is wrong"
        pages = [entry.page for entry in children]
        assert len(set(pages)) == len(pages), "a page is cached twice"
        assert sum(entry.num_locks > 0 for entry in children) == self._num_locked, "the number of locked pages is wrong"


def _path_to(handle: Entry | None) -> list[Entry]:
    entries = []
    while handle is not None:
        entries.append(handle)
        handle = handle.parent
    return entries


def _page_ids(path: list[Entry]) -> PageIds:
    return np.array([entry.page for entry in path], dtype=np.int32)
