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
safe because each layer of a step stores the K and V of all prefills before any prefill of that layer attends. Decodes read no
pages that the same step writes, apart from that of their own token.
"""

import numpy as np

from minisgl_core.contracts.prefix_cache import PrefixCache, PrefixInsert, PrefixMatch
from minisgl_core.kv.allocator import Int32Array, PageAllocator
from minisgl_core.plugins.hooks import Hooks
from minisgl_core.scheduler.request import Request
from minisgl_core.scheduler.running_requests import RunningRequests


class PageManager:
    """Manager that moves pages between free list, requests and prefix cache, and collects the page-table writes."""

    def __init__(
        self, num_pages: int, page_size: int, cache: PrefixCache, running: RunningRequests, hooks: Hooks
    ) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        self.cache = cache
        self._running, self._hooks = running, hooks
        self._num_insertions = 0
        """Insertions into the cache that added pages. Until the next one, no match becomes longer."""
        self._table_writes: list[tuple[Int32Array, Int32Array, Int32Array]] = []
        """(rows, columns, pages) of the writes that no plan has yet: several pages of one request, or one page of each decode."""

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
        return self._num_usable(request, self.cache.match(request.tokens, request.namespace)) * self.page_size

    def surely_lacks_pages(self, request: Request, num_tokens: int, num_available: int) -> bool:
        """Return True if the last match shows that a waiting request needs more than `num_available` pages.

        Without insertions since then, a match would not be longer now. So the cache need not be searched again.
        """
        is_known = request.matched_at == self._num_insertions
        return is_known and self.pages_for(num_tokens) - request.num_matched > num_available

    def attach_cached(self, request: Request) -> None:
        """Replace the computed prefix of a request by a cached one, if that is longer.

        The page-table entries are set to the shared pages first. Then the request's own pages that they replace are freed. Steps
        in flight may still read the freed pages. This is safe, because any step that overwrites them is launched later.
        """
        if request.sampling.prompt_logprobs is not None:  # they need the hidden states of the whole prompt
            return
        tokens = request.tokens
        match = self.cache.match(tokens, request.namespace)
        num_usable = self._num_usable(request, match)
        request.num_matched, request.matched_at = num_usable, self._num_insertions
        if num_usable * self.page_size <= request.num_computed:
            return
        if num_usable < len(match.pages):
            match = self.cache.match(tokens[: num_usable * self.page_size], request.namespace)
            assert len(match.pages) == num_usable, "a cache matched fewer pages of a shorter prefix"
        num_kept = request.num_shared
        self._lock(request, match.handle, num_usable)
        replaced = request.pages[num_kept:].copy()
        assert len(replaced) <= num_usable
        self._running.num_pages[request.row] = num_kept
        self._extend(request, match.pages[num_kept:])
        self.allocator.free(replaced)
        request.num_computed = num_usable * self.page_size

    def _lock(self, request: Request, handle: object, num_pages: int) -> None:
        """Lock the cached prefix that a request shares from now on, and unlock the one that it shared before."""
        self.cache.lock(handle)
        if request.handle is not None:
            self.cache.unlock(request.handle)
        request.handle, request.num_shared = handle, num_pages

    def _num_usable(self, request: Request, match: PrefixMatch) -> int:
        """Return how many pages of a match the request could use; the page of its last token is never one of them."""
        return min(len(match.pages), (request.num_tokens - 1) // self.page_size)

    def detach(self, request: Request) -> None:
        """Undo `attach_cached`, page-table entries included, for a request that was not admitted."""
        # All entries of a write are of this request, or none is.
        self._table_writes = [write for write in self._table_writes if write[0][0] != request.row]
        if request.handle is not None:
            self.cache.unlock(request.handle)
        self._running.remove(request)

    def missing_pages(self, request: Request, num_tokens: int) -> int:
        """Return how many more pages the request needs to hold `num_tokens` tokens."""
        return max(0, self.pages_for(num_tokens) - request.num_pages)

    def take(self, request: Request, num_tokens: int) -> None:
        """Give the request pages for `num_tokens` tokens, evicting cached pages if needed. `num_available` must suffice."""
        missing = self.missing_pages(request, num_tokens)
        if missing > 0:
            self._extend(request, self._allocate(missing))

    def decodes_without_page(self, rows: Int32Array) -> Int32Array:
        """Return those of the decoding rows that need a page for their next token."""
        running = self._running
        without_page: Int32Array = rows[running.num_computed[rows] == running.num_pages[rows] * self.page_size]
        return without_page

    def take_one_each(self, rows: Int32Array) -> None:
        """Give each row a page, evicting cached pages if needed. `num_available` must suffice."""
        if len(rows):
            pages = self._allocate(len(rows))
            self._table_writes.append((rows, self._running.add_pages(rows, pages), pages))

    def num_reserved(self) -> int:
        """Return how many pages the running requests need for one more token each."""
        running = self._running
        rows = running.rows[running.is_live(running.rows)]
        missing = -(-(running.lengths[rows] + 1) // self.page_size) - running.num_pages[rows]
        return int(np.maximum(missing, 0).sum())

    def _allocate(self, num_pages: int) -> Int32Array:
        shortfall = num_pages - self.allocator.num_free
        if shortfall > 0:
            evicted = self.cache.evict(shortfall)
            if self._hooks.pages_evicted is not None:
                self._hooks.pages_evicted(pages=evicted)
            self.allocator.free(evicted)
        return self.allocator.allocate(num_pages)

    def share(self, request: Request) -> None:
        """Insert the full pages of a request into the prefix cache, also those that planned steps are going to fill.

        This is skipped if the cache already holds more pages of the prefix than the request shares. The request then has
        duplicates of these pages. Two cases cause duplicates: the last page of a fully cached prompt is computed again, and so
        are all pages of a prompt whose log-probabilities are requested. `release` inserts the request's pages later.
        """
        tokens = request.known_computed
        num_pages = len(tokens) // self.page_size
        if num_pages <= request.num_shared:
            return
        if len(self.cache.match(tokens, request.namespace).pages) > request.num_shared:
            return
        inserted = self._insert(request, tokens, request.pages[:num_pages])
        if len(inserted.pages) > request.num_shared:
            self._lock(request, inserted.handle, len(inserted.pages))

    def release(self, request: Request) -> None:
        """Release all pages of a request that is in no step in flight. Insert its known prefix into the cache."""
        assert request.num_inflight == 0, "released while a step in flight reads its pages"
        tokens = request.known_computed
        num_pages = len(tokens) // self.page_size
        pages, own_start = request.pages, request.num_shared
        if num_pages > own_start:
            inserted = self._insert(request, tokens, pages[:num_pages])
            self.allocator.free(pages[own_start : inserted.num_present])  # duplicates of cached pages
            own_start = max(len(inserted.pages), own_start)
        if request.handle is not None:
            self.cache.unlock(request.handle)
        self.allocator.free(pages[own_start:])
        request.matched_at = -1
        self._running.remove(request)

    def _insert(self, request: Request, tokens: Int32Array, pages: Int32Array) -> PrefixInsert:
        """Insert pages into the cache, and call the hook for the pages that the cache took."""
        inserted = self.cache.insert(tokens, pages, request.namespace)
        if len(inserted.pages) == inserted.num_present:
            return inserted
        self._num_insertions += 1
        if self._hooks.pages_cached is not None:
            known = tokens[: len(inserted.pages) * self.page_size].copy()
            self._hooks.pages_cached(
                namespace=request.namespace, token_ids=known, pages=inserted.pages, num_present=inserted.num_present
            )
        return inserted

    def drain_table_writes(self) -> Int32Array:
        """Return the page-table writes since the last call: rows, columns, pages, int32 [3 * N]; each entry once."""
        if not self._table_writes:
            return np.empty(0, np.int32)
        rows, columns, pages = map(np.concatenate, zip(*self._table_writes, strict=True))
        is_one = len(self._table_writes) == 1
        self._table_writes.clear()
        if is_one:
            return np.concatenate((rows, columns, pages))
        # The order of two writes to one entry is undefined in a scatter, so only the last one is kept.
        keys = rows.astype(np.int64) << 32 | columns
        _, last = np.unique(keys[::-1], return_index=True)
        keep = np.sort(len(keys) - 1 - last) if len(last) < len(keys) else slice(None)
        return np.concatenate((rows[keep], columns[keep], pages[keep]))

    def _extend(self, request: Request, pages: Int32Array) -> None:
        row, start = request.row, request.num_pages
        end = start + len(pages)
        self._running.pages[row, start:end], self._running.num_pages[row] = pages, end
        columns = np.arange(start, end, dtype=np.int32)
        self._table_writes.append((np.full(len(pages), row, np.int32), columns, pages))

    def check(self) -> None:
        """Verify that every page has exactly one owner. For tests."""
        self.allocator.check()
        self.cache.check()
        own = [request.pages[request.num_shared :] for request in self._running.all()]
        owned = np.concatenate(own) if own else np.empty(0, np.int32)
        assert len(np.unique(owned)) == len(owned), "two requests own a page"
        total = self.allocator.num_free + self.cache.num_pages + len(owned)
        assert total == self.allocator.capacity, f"{self.allocator.capacity - total} pages have no owner"
