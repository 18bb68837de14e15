"""Ownership of KV pages.

Every page has exactly one owner at any time:

    free list  --take-->  request's own pages  --share-->  prefix cache
        ^                        |                              |
        +------- release --------+          evict               |
        +-------------------------------------------------------+

A request uses locked pages of the prefix cache, followed by pages of its own:

    pages   | 0 ........ num_shared | num_shared ........ len(pages) |
    owner   |     prefix cache      |            request             |

`share` runs when a step is planned. Requests that are planned later, even in the same step, can then use the prefix. This is
safe because each layer of a step stores all K and V before any query of that layer attends.
"""

from __future__ import annotations

import numpy as np

from minisgl_core.contracts.prefix_cache import PrefixCache, PrefixInsert, PrefixMatch
from minisgl_core.kv.allocator import Int32, PageAllocator
from minisgl_core.plugins.hooks import Hooks
from minisgl_core.scheduler.request import Request


class PageManager:
    """Manager that moves pages between free list, requests and prefix cache, and collects the page-table writes."""

    def __init__(self, num_pages: int, page_size: int, cache: PrefixCache, hooks: Hooks) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        self.cache = cache
        self._hooks = hooks
        self._table_writes: list[tuple[int, int, Int32]] = []

    @property
    def num_available(self) -> int:
        """Pages that could be taken now: free pages and evictable pages of the cache."""
        return self.allocator.num_free + self.cache.num_evictable

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that `num_tokens` tokens need."""
        return -(-num_tokens // self.page_size)

    def num_cached_tokens(self, request: Request) -> int:
        """Return how many cached tokens the request could use. Its last token is always computed again."""
        if request.sampling.prompt_logprobs is not None:
            return 0
        return self._num_usable(request, self.cache.match(request.tokens.view, request.namespace)) * self.page_size

    def attach_cached(self, request: Request) -> None:
        """Let the request use the cached prefix that is longer than what it has computed.

        The page-table entries are moved to the shared pages first. The request's own pages that they replace are freed after
        that. Steps in flight may still read these pages, since they were launched before any step that could write to them.
        """
        if request.sampling.prompt_logprobs is not None or request.num_pending:
            return
        tokens = request.tokens.view
        match = self.cache.match(tokens, request.namespace)
        num_usable = self._num_usable(request, match)
        if num_usable * self.page_size <= request.num_computed:
            return
        if num_usable < len(match.pages):
            match = self.cache.match(tokens[: num_usable * self.page_size], request.namespace)
            assert len(match.pages) == num_usable, "a cache matched fewer pages of a shorter prefix"
        self.cache.lock(match.handle)
        if request.handle is not None:
            self.cache.unlock(request.handle)
        replaced = request.pages.view[request.num_shared :].copy()
        assert len(replaced) <= num_usable
        request.pages.truncate(request.num_shared)
        fresh = match.pages[request.num_shared :]
        self._extend(request, fresh)
        self.allocator.free(replaced)
        request.handle = match.handle
        request.num_shared = num_usable
        request.num_computed = num_usable * self.page_size

    def _num_usable(self, request: Request, match: PrefixMatch) -> int:
        """Return how many pages of a match the request could use; the page of its last token is never one of them."""
        return min(len(match.pages), (len(request.tokens) - 1) // self.page_size)

    def detach(self, request: Request) -> None:
        """Undo `attach_cached`, page-table entries included, for a request that was not admitted."""
        self._table_writes = [write for write in self._table_writes if write[0] != request.row]
        if request.handle is not None:
            self.cache.unlock(request.handle)
        request.reset()

    def missing_pages(self, request: Request, num_tokens: int) -> int:
        """Return how many more pages the request needs to hold `num_tokens` tokens."""
        return max(0, self.pages_for(num_tokens) - len(request.pages))

    def take(self, request: Request, num_tokens: int) -> None:
        """Give the request pages for `num_tokens` tokens, and evict cached pages if needed. They must be available."""
        missing = self.missing_pages(request, num_tokens)
        if missing == 0:
            return
        shortfall = missing - self.allocator.num_free
        if shortfall > 0:
            evicted = self.cache.evict(shortfall)
            if self._hooks.pages_evicted is not None:
                self._hooks.pages_evicted(pages=evicted)
            self.allocator.free(evicted)
        self._extend(request, self.allocator.allocate(missing))

    def share(self, request: Request) -> None:
        """Insert the request's computed pages into the cache.

        This is skipped if the cache holds more pages of the prefix than the request shares. The request has its own copies of
        these pages then: the last page of a fully cached prompt is computed again, and so are all pages of a prompt whose
        log-probabilities are requested. `release` inserts them later.
        """
        tokens = request.known_computed
        num_pages = len(tokens) // self.page_size
        if num_pages <= request.num_shared:
            return
        if len(self.cache.match(tokens, request.namespace).pages) > request.num_shared:
            return
        inserted = self._insert(request, tokens, request.pages.view[:num_pages])
        num_taken = len(inserted.pages)
        if num_taken == request.num_shared:
            return
        self.cache.lock(inserted.handle)
        if request.handle is not None:
            self.cache.unlock(request.handle)
        request.handle, request.num_shared = inserted.handle, num_taken

    def release(self, request: Request) -> None:
        """Release all pages of a request that is in no step in flight. Insert its known prefix into the cache."""
        assert request.num_inflight == 0, "released while a step in flight reads its pages"
        tokens = request.known_computed
        num_pages = len(tokens) // self.page_size
        num_owned_from = request.num_shared
        duplicates = np.empty(0, np.int32)
        if num_pages > request.num_shared:
            own = request.pages.view
            inserted = self._insert(request, tokens, own[:num_pages])
            duplicates = own[request.num_shared : max(inserted.num_present, request.num_shared)].copy()
            num_owned_from = max(len(inserted.pages), request.num_shared)
        rest = request.pages.view[num_owned_from:].copy()
        if request.handle is not None:
            self.cache.unlock(request.handle)
        self.allocator.free(duplicates)
        self.allocator.free(rest)
        request.reset()

    def _insert(self, request: Request, tokens: Int32, pages: Int32) -> PrefixInsert:
        """Insert pages into the cache, and call the hook for the pages that the cache took."""
        inserted = self.cache.insert(tokens, pages, request.namespace)
        if self._hooks.pages_cached is not None and len(inserted.pages) > inserted.num_present:
            known = tokens[: len(inserted.pages) * self.page_size].copy()
            self._hooks.pages_cached(
                namespace=request.namespace, token_ids=known, pages=inserted.pages, num_present=inserted.num_present
            )
        return inserted

    def drain_table_writes(self) -> Int32:
        """Return the page-table writes since the last call: rows, columns, pages, int32 [3 * N]; each entry once."""
        if not self._table_writes:
            return np.empty(0, np.int32)
        rows = np.concatenate([np.full(len(pages), row, np.int32) for row, _, pages in self._table_writes])
        columns = np.concatenate(
            [np.arange(start, start + len(pages), dtype=np.int32) for _, start, pages in self._table_writes]
        )
        pages = np.concatenate([pages for _, _, pages in self._table_writes])
        self._table_writes.clear()
        # The order of two writes to one entry is undefined in a scatter, so only the last one is kept.
        keys = rows.astype(np.int64) << 32 | columns
        _, last = np.unique(keys[::-1], return_index=True)
        keep = np.sort(len(keys) - 1 - last) if len(last) < len(keys) else slice(None)
        return np.concatenate((rows[keep], columns[keep], pages[keep]))

    def _extend(self, request: Request, pages: Int32) -> None:
        self._table_writes.append((request.row, len(request.pages), pages))
        request.pages.extend(pages)

    def check(self, running: list[Request]) -> None:
        """Verify that every page has exactly one owner. For tests."""
        self.allocator.check()
        self.cache.check()
        own = [request.pages.view[request.num_shared :] for request in running]
        owned = np.concatenate(own) if own else np.empty(0, np.int32)
        assert len(np.unique(owned)) == len(owned), "two requests own a page"
        total = self.allocator.num_free + self.cache.num_pages + len(owned)
        assert total == self.allocator.capacity, f"{self.allocator.capacity - total} pages have no owner"
