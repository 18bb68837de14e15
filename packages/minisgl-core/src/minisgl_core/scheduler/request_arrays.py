"""State of the running requests in arrays, which are indexed by the row of the page table.

A step of decodes changes the same few numbers of every request. In arrays, this takes a few operations per step instead of a
loop over the requests.
"""

import numpy as np
import numpy.typing as npt

from minisgl_core.kv.allocator import Int32Array
from minisgl_core.scheduler.limits import SchedulerLimits

Bools = npt.NDArray[np.bool_]


class RequestArrays:
    """Arrays of the state of requests with a row, each [R] unless stated otherwise. Row 0 is for padding.

    The counts and flags of row 0 and of free rows are 0. So a waiting request, whose row is 0, has no pages and no computed
    tokens. The other arrays keep the values of the last request.

    Attributes:
        tokens: token ids of each row, of which the first `num_tokens` are known to the host, int32 [R, max_seq_len]. The memory
            of `tokens` and `pages` becomes resident only where it is written to.
        pages: page ids of each row, of which the first `num_pages` are valid, int32 [R, pages of max_seq_len].
        num_prompt_tokens, num_computed, num_pending, num_inflight: as in `Request`.
        max_length: as in `Request`; 0 once the request has ended.
        last_token: last token known to the host.
        is_plain: True for a request without a grammar and without log-probabilities, so that its new tokens need no further work.
        worker, request_id: as in `Request`.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        rows, max_pages = limits.max_running + 1, -(-limits.max_seq_len // limits.page_size)
        self.tokens, self.pages = (np.empty((rows, width), np.int32) for width in (limits.max_seq_len, max_pages))
        self._counts = np.zeros((7, rows), np.int32)
        self.num_tokens, self.num_pages, self.num_prompt_tokens, self.num_computed = self._counts[:4]
        self.num_pending, self.num_inflight, self.max_length = self._counts[4:]
        self.last_token, self.worker = np.zeros((2, rows), np.int32)
        self.is_plain = np.zeros(rows, np.bool_)
        self.request_id = np.full(rows, "", object)

    @property
    def lengths(self) -> Int32Array:
        """`Request.length` of every row."""
        lengths: Int32Array = self.num_tokens + self.num_pending
        return lengths

    def count_planned(self, rows: Int32Array, sampled: Int32Array, decodes: Int32Array) -> None:
        """Update the counts for a planned step: all of its rows, those that sample a token, and those that decode."""
        self.num_inflight[rows] += 1
        self.num_pending[sampled] += 1
        self.num_computed[decodes] += 1

    def count_processed(self, rows: Int32Array, sampled: Int32Array) -> None:
        """Update the counts for a processed step: all of its rows, and those that sampled a token."""
        self.num_inflight[rows] -= 1
        self.num_pending[sampled] -= 1

    def add_pages(self, rows: Int32Array, pages: Int32Array) -> Int32Array:
        """Append a page to each row. Return the index of each page in its row."""
        columns: Int32Array = self.num_pages[rows]
        self.pages[rows, columns] = pages
        self.num_pages[rows] += 1
        return columns

    def is_live(self, rows: Int32Array) -> Bools:
        """Return True for each row whose request has not ended."""
        is_live: Bools = self.max_length[rows] > 0
        return is_live
