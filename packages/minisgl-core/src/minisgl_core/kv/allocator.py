"""Host-side allocator of KV pages."""

import numpy as np
import numpy.typing as npt

from minisgl_core.errors import OutOfPagesError

Int32Array = npt.NDArray[np.int32]


class PageAllocator:
    """Free list of the KV pool.

    Page 0 receives the writes of padding tokens and is never allocated, so a pool of P pages holds P - 1 pages of tokens.

    Attributes:
        capacity, num_free: number of pages that can be allocated in total, and now.
        is_free: flag per page of the pool, bool [P]: True if the page is free.
    """

    def __init__(self, num_pages: int) -> None:
        """Put all pages but page 0 on the free list of a pool with `num_pages` pages, P."""
        self._free = np.arange(num_pages - 1, 0, -1, dtype=np.int32)
        self.capacity = self.num_free = num_pages - 1
        self.is_free = np.ones(num_pages, dtype=np.bool_)
        self.is_free[0] = False

    def allocate(self, num_pages: int) -> Int32Array:
        """Allocate `num_pages` pages; return their ids, int32 [num_pages]. If fewer are free, raise OutOfPagesError."""
        if num_pages > self.num_free:
            raise OutOfPagesError(f"{num_pages} pages were requested, but only {self.num_free} are free")
        start = self.num_free - num_pages
        pages = self._free[start : self.num_free].copy()
        self.num_free = start
        self.is_free[pages] = False
        return pages

    def free(self, pages: Int32Array) -> None:
        """Free pages. Each must have been allocated and not freed since."""
        if len(pages) == 0:
            return
        assert pages.min() > 0, "page 0 is reserved for padding"
        assert not self.is_free[pages].any(), f"pages freed twice or never allocated: {pages}"
        self.is_free[pages] = True
        self._free[self.num_free : self.num_free + len(pages)] = pages
        self.num_free += len(pages)

    def check(self) -> None:
        """Verify that the free list and the flags agree. O(P); for tests."""
        listed = self._free[: self.num_free]
        assert len(np.unique(listed)) == self.num_free, "a page is listed twice"
        assert self.is_free[listed].all(), "a listed page is not marked free"
        assert np.count_nonzero(self.is_free) == self.num_free, "a page marked free is not listed"
