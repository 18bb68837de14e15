"""The running requests, and the rows of the page table that they occupy.

A step of decodes changes the same few numbers of every request. In arrays, indexed by the row, this takes a few operations per
step instead of a loop over the requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from minisgl_core.kv.allocator import Int32Array
from minisgl_core.scheduler.limits import SchedulerLimits

if TYPE_CHECKING:
    from minisgl_core.scheduler.request import Request

Bools = npt.NDArray[np.bool_]


class RunningRequests:
    """Requests with a row, in order of admission, and arrays of their state, each [R] unless stated otherwise.

    Row 0 is for padding. Its counts and flags, and those of free rows, are 0. So a waiting request, whose row is 0, has no pages
    and no computed tokens. The other arrays keep the values of the last request.

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
        self._num_stopping = np.zeros(limits.vocab_size, np.int32)
        """Number of admitted requests that each token stops."""
        self._requests: dict[int, Request] = {}
        """Admitted requests by row, in order of admission."""
        self._rows: Int32Array | None = None
        self._free_rows = list(range(limits.max_running, 0, -1))

    @property
    def num_free_rows(self) -> int:
        """Number of requests that `assign` could still give a row."""
        return len(self._free_rows)

    def assign(self, request: Request) -> None:
        """Assign a free row to a waiting request, which `admit` or `remove` must follow."""
        tokens = request.tokens
        row = request.row = self._free_rows.pop()
        self.tokens[row, : len(tokens)], self.num_tokens[row] = tokens, len(tokens)
        self.num_prompt_tokens[row], self.max_length[row] = request.num_prompt_tokens, request.max_length
        self.last_token[row] = tokens[-1]
        self.worker[row], self.request_id[row] = request.worker, request.request_id
        self.is_plain[row] = request.constraint is None and request.sampling.logprobs is None

    def admit(self, request: Request) -> None:
        """Append a request with a row to the running requests."""
        self._requests[request.row] = request
        self._rows = None
        self._num_stopping[list(request.stop_ids)] += 1

    def remove(self, request: Request) -> None:
        """Discard the computed state of a request, and free its row if it has one."""
        row = request.row
        request.reset()  # which reads its tokens from the arrays
        if not row:
            return
        if self._requests.pop(row, None) is not None:
            self._rows = None
            self._num_stopping[list(request.stop_ids)] -= 1
        self._counts[:, row] = 0
        self.is_plain[row] = False
        self._free_rows.append(row)

    @property
    def rows(self) -> Int32Array:
        """Rows of the running requests in order of admission."""
        if self._rows is None:
            self._rows = np.fromiter(self._requests, np.int32, len(self._requests))
        return self._rows

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, row: int) -> Request:
        return self._requests[row]

    def all(self) -> list[Request]:
        """Return the running requests in order of admission."""
        return list(self._requests.values())

    def schedulable(self) -> tuple[Int32Array, Int32Array]:
        """Return the rows that can decode, and those that have more tokens to prefill."""
        lengths, rows = self.lengths, self.rows
        num_left = lengths - self.num_computed
        wants_step = lengths < self.max_length
        decodes = wants_step & (num_left == 1) & (lengths > self.num_prompt_tokens)
        prefills = wants_step & (num_left > 0) & ~decodes
        return rows[decodes[rows]], rows[prefills[rows]]

    def add_tokens(self, rows: Int32Array, token_ids: Int32Array) -> Bools:
        """Append a sampled token to each row. Return True for each row whose output of the step is only the token.

        These are the rows of plain requests, unless the token is the request's first or may be its last.
        """
        self.tokens[rows, self.num_tokens[rows]] = token_ids
        self.last_token[rows] = token_ids
        self.num_tokens[rows] += 1
        lengths = self.num_tokens[rows]
        continues = (lengths < self.max_length[rows]) & (self._num_stopping[token_ids] == 0)
        is_token_only: Bools = continues & self.is_plain[rows] & (lengths > self.num_prompt_tokens[rows] + 1)
        return is_token_only

    def end(self, request: Request) -> None:
        """Exclude a request from further steps. `remove` clears its row."""
        self.max_length[request.row] = 0

    def removable(self, rows: Int32Array) -> list[Request]:
        """Return the requests among the rows that have ended and are in no step in flight."""
        # A row that was freed already has no prompt tokens.
        is_removable = (self.num_inflight[rows] + self.max_length[rows] == 0) & (self.num_prompt_tokens[rows] > 0)
        return [self._requests[row] for row in rows[is_removable].tolist()]

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

    def check(self) -> None:
        """Verify that free rows have no state, and that the arrays agree with the requests. For tests."""
        assert sorted((*self._free_rows, *self._requests)) == list(range(1, len(self.worker))), "a row is lost"
        for row in range(len(self.worker)):
            if row in self._requests:
                request = self._requests[row]
                assert request.row == row, "a request has another row"
                assert (request.finish_reason is None) == (self.max_length[row] > 0), (
                    "max_length does not tell if a request has ended"
                )
            else:
                assert not self._counts[:, row].any(), "a free row has state"
        num_stopping = np.zeros_like(self._num_stopping)
        for request in self._requests.values():
            num_stopping[list(request.stop_ids)] += 1
        assert (num_stopping == self._num_stopping).all(), "the counts of stop tokens are wrong"
