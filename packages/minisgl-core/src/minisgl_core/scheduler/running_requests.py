"""The running requests, and the rows of the page table that they occupy."""

import numpy as np

from minisgl_core.kv.allocator import Int32Array
from minisgl_core.scheduler.limits import SchedulerLimits
from minisgl_core.scheduler.request import Request
from minisgl_core.scheduler.request_arrays import Bools, RequestArrays


class RunningRequests(RequestArrays):
    """Requests with a row, in order of admission, and the arrays of their state."""

    def __init__(self, limits: SchedulerLimits) -> None:
        super().__init__(limits)
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
