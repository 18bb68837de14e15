"""State of the running requests in arrays, which are indexed by the row of the page table.

A step of decodes changes the same few numbers of every request. In arrays, this takes a few operations per step instead of a
walk over the requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from minisgl_core.scheduler.int32_buffer import Int32
from minisgl_core.scheduler.row_buffers import RowBuffers

if TYPE_CHECKING:
    from minisgl_core.scheduler.request import Request

Bools = npt.NDArray[np.bool_]


class RunningRequests:
    """Requests with a row, and the arrays of their state, each [R]. All numbers of row 0 and of free rows are 0.

    Attributes:
        tokens, pages, num_prompt, num_computed, num_pending, num_inflight: as in `Request`.
        max_length: as in `Request`; 0 once the request has ended.
        last_token: last token known to the host.
        is_plain: True if nothing depends on a token of the output but its end: there are no grammar and no log-probabilities.
        worker, request_id: as in `Request`.
    """

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        """Allocate the arrays for `num_rows` rows besides row 0."""
        rows = num_rows + 1
        self.tokens, self.pages = RowBuffers(rows), RowBuffers(rows)
        numbers = np.zeros((7, rows), np.int32)
        self.num_prompt, self.num_computed, self.num_pending, self.num_inflight = numbers[:4]
        self.max_length, self.last_token, self.worker = numbers[4:]
        self.is_plain = np.zeros(rows, np.bool_)
        self.request_id = np.full(rows, "", object)
        self._num_stopping = np.zeros(vocab_size, np.int32)
        """Number of admitted requests that each token stops."""
        self._requests: dict[int, Request] = {}
        """Admitted requests by row, in order of admission."""
        self._rows: Int32 | None = None

    def assign(self, request: Request, row: int) -> None:
        """Give a waiting request a row, without admitting it yet."""
        self.tokens.give(row, request.tokens)
        request.row = row
        self.num_prompt[row], self.max_length[row] = request.num_prompt, request.max_length
        self.last_token[row] = request.tokens.view[-1]
        self.worker[row], self.request_id[row] = request.worker, request.request_id
        self.is_plain[row] = request.constraint is None and request.sampling.logprobs is None

    def admit(self, request: Request) -> None:
        """Count a request with a row as running, after those that run already."""
        self._requests[request.row] = request
        self._rows = None
        self._num_stopping[list(request.stop_ids)] += 1

    def remove(self, request: Request) -> None:
        """Take the row of a request away. It keeps its tokens."""
        row = request.row
        if self._requests.pop(row, None) is not None:
            self._rows = None
            self._num_stopping[list(request.stop_ids)] -= 1
        self.tokens.take(row)
        self.pages.take(row)
        for array in (self.num_prompt, self.num_computed, self.num_pending, self.num_inflight, self.max_length):
            array[row] = 0
        self.is_plain[row] = False
        request.row = 0

    @property
    def rows(self) -> Int32:
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

    @property
    def lengths(self) -> Int32:
        """`Request.length` of every row."""
        lengths: Int32 = self.tokens.lengths + self.num_pending
        return lengths

    def wanted(self) -> tuple[Int32, Int32]:
        """Return the rows that want a decode, and those that want to compute more of the tokens that they have."""
        lengths, rows = self.lengths, self.rows
        num_left = lengths - self.num_computed
        wants_step = lengths < self.max_length
        decodes = wants_step & (num_left == 1) & (lengths > self.num_prompt)
        prefills = wants_step & (num_left > 0) & ~decodes
        return rows[decodes[rows]], rows[prefills[rows]]

    def launch(self, rows: Int32, sampled: Int32, decodes: Int32) -> None:
        """Count a step: its rows, those that it samples for, and those that it decodes."""
        self.num_inflight[rows] += 1
        self.num_pending[sampled] += 1
        self.num_computed[decodes] += 1

    def landed(self, rows: Int32, sampled: Int32) -> None:
        """Undo the counts of a step that is processed."""
        self.num_inflight[rows] -= 1
        self.num_pending[sampled] -= 1

    def add_tokens(self, rows: Int32, token_ids: Int32) -> Bools:
        """Append a sampled token to each row. Return True where that is all, because the request is plain and goes on.

        It is False for the first token of a request.
        """
        self.tokens.append(rows, token_ids)
        self.last_token[rows] = token_ids
        lengths = self.tokens.lengths[rows]
        goes_on = (lengths < self.max_length[rows]) & (self._num_stopping[token_ids] == 0)
        is_all: Bools = goes_on & self.is_plain[rows] & (lengths > self.num_prompt[rows] + 1)
        return is_all

    def end(self, request: Request) -> None:
        """Have a request run no further step. Its row is taken away by `remove`."""
        self.max_length[request.row] = 0

    def is_live(self, rows: Int32) -> Bools:
        """Return True for each row whose request has not ended."""
        is_live: Bools = self.max_length[rows] > 0
        return is_live

    def done(self, rows: Int32) -> list[Request]:
        """Return those of the rows' requests that have ended and are in no step in flight."""
        is_done = (self.num_inflight[rows] + self.max_length[rows] == 0) & (self.num_prompt[rows] > 0)
        return [self._requests[row] for row in rows[is_done].tolist()]

    def check(self) -> None:
        """Verify that free rows have no state, and that the arrays agree with the requests. For tests."""
        numbers = (self.num_prompt, self.num_computed, self.num_pending, self.num_inflight, self.max_length)
        for row in range(len(self.worker)):
            for buffers in (self.tokens, self.pages):
                assert len(buffers[row]) == buffers.lengths[row], "a length is wrong"
            if row in self._requests:
                request = self._requests[row]
                assert request.row == row, "a request has another row"
                assert (request.finish_reason is None) == (self.max_length[row] > 0), "an end was not noted"
            else:
                assert not any(array[row] for array in (*numbers, self.tokens.lengths, self.pages.lengths))
        num_stopping = np.zeros_like(self._num_stopping)
        for request in self._requests.values():
            num_stopping[list(request.stop_ids)] += 1
        assert (num_stopping == self._num_stopping).all(), "a stop token is missing"
