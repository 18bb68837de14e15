"""State of one request in the scheduler."""

import time

import numpy as np

from minisgl_core.contracts.prefix_cache import CacheNamespace
from minisgl_core.kv.allocator import Int32Array
from minisgl_core.plugins.hookspecs import RequestRecord
from minisgl_core.protocol.messages import LogprobArrays, Submit
from minisgl_core.scheduler.constraints import Constraint
from minisgl_core.scheduler.request_arrays import RequestArrays
from minisgl_core.scheduler.token_rules import TokenRules


class Request:
    """State of a request from arrival to release.

    A prefix of the request's tokens has been computed. With overlap, the last token may be in flight: a planned step samples
    it, and the host does not know it yet.

        tokens   |<-------------- num_tokens -------------->|<----- num_pending ----->|
        KV       |<-- num_computed -->|<-- to compute ------------------------------->|
        pages    |<-- num_shared: the cache's, locked -->|<-- the request's own -->|

    The state that changes with every token is in `RequestArrays`, at the request's row.

    Attributes:
        request_id: id of the request in messages.
        worker: index of the tokenizer worker that the output goes to.
        arrival: number in order of arrival, from 1.
        max_length: length of the sequence at which the output ends, prompt and output together.
        stop_ids: tokens that end the output: stop tokens and, without ignore_eos, EOS tokens.
        num_cached: prompt tokens found in the cache at the first admission, for the usage report; -1 before.
        num_shared: number of its first pages that belong to the prefix cache.
        handle: the cache's handle of these first pages, which the request locks; None if there are none.
        num_matched, matched_at: usable pages of its last match, and the number of insertions into the cache before it; see
            `PageManager.surely_lacks_pages`.
        namespace: namespace of its prefix in the cache, from salt and adapter.
        row: page-table row; 0 while waiting.
        arrival_s, scheduled_s, first_token_s, num_preemptions: for the request's record; times by ``time.monotonic()``.
        constraint: state of the output's grammar, if there is one; it has accepted the output tokens known to the host.
        token_rules: further restrictions of the tokens that may be generated.
        prompt_logprobs: parts of the prompt's log-probabilities so far; None if they are not requested or were returned.
        sampler_state_sent: True once a plan has set the row's penalty counts and logit biases.
        finish_reason: set once; the request is released when `num_inflight` is 0.
    """

    def __init__(
        self,
        submit: Submit,
        running: RequestArrays,
        *,
        arrival: int,
        seed: int,
        eos_ids: frozenset[int],
        constraint: Constraint | None = None,
    ) -> None:
        """Create a waiting request. The client's seed has priority over `seed`."""
        sampling = submit.sampling
        self._running, self.row = running, 0
        self.request_id, self.worker = submit.request_id, submit.worker
        self.priority, self.sampling = submit.priority, sampling
        self.user, self.namespace = submit.user, CacheNamespace(submit.cache_salt, submit.adapter_id)
        self.arrival = arrival
        self.arrival_s = time.monotonic()
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.num_preemptions = 0
        self._tokens: Int32Array = submit.token_ids
        """Tokens while the request has no row; otherwise `RequestArrays.tokens` has them."""
        self.num_prompt_tokens = len(submit.token_ids)
        self.max_length = self.num_prompt_tokens + sampling.max_tokens
        self.seed = np.uint64((seed if sampling.seed is None else sampling.seed) % 2**64)
        self.stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos_ids)
        self.bias_ids, self.bias_values = submit.bias_ids, submit.bias_values
        self.token_rules = TokenRules.of(submit)
        self.prompt_logprobs: list[LogprobArrays] | None = None if sampling.prompt_logprobs is None else []
        self.constraint = constraint
        self.num_cached = self.matched_at = -1
        self.num_matched = 0
        self.finish_reason: str | None = None
        self.reset()

    def reset(self) -> None:
        """Discard the row and the computed state, and keep the tokens. `RunningRequests.remove` frees the row."""
        if self.row and self.num_output:
            self._tokens = self.tokens.copy()
        self.row = 0
        self.num_shared = 0
        self.handle: object = None
        self.sampler_state_sent = False
        if self.prompt_logprobs is not None and self.num_output == 0:
            self.prompt_logprobs = []

    @property
    def num_tokens(self) -> int:
        """Number of tokens known to the host."""
        return int(self._running.num_tokens[self.row]) if self.row else len(self._tokens)

    @property
    def tokens(self) -> Int32Array:
        """Prompt and output tokens known to the host; a view that is valid until the next change."""
        return self._running.tokens[self.row, : self.num_tokens] if self.row else self._tokens

    @property
    def num_pages(self) -> int:
        """Number of pages, the cache's and its own."""
        return int(self._running.num_pages[self.row])

    @property
    def pages(self) -> Int32Array:
        """Page ids in order; a view that is valid until the next change. `PageManager` changes them."""
        pages: Int32Array = self._running.pages[self.row, : self.num_pages]
        return pages

    @property
    def num_computed(self) -> int:
        """Tokens whose KV is in the pool once all planned steps are done."""
        return int(self._running.num_computed[self.row])

    @num_computed.setter
    def num_computed(self, value: int) -> None:
        self._running.num_computed[self.row] = value

    @property
    def num_pending(self) -> int:
        """Tokens that steps in flight sample. It is 0 or 1 before a step is planned, and may then be 2 until the
        earlier step is processed."""
        return int(self._running.num_pending[self.row])

    @property
    def num_inflight(self) -> int:
        """Planned steps that include the request and are not processed yet."""
        return int(self._running.num_inflight[self.row])

    @property
    def num_output(self) -> int:
        """Output tokens known to the host."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def max_tokens_left(self) -> int:
        """Maximum number of output tokens that are still to come and not known to the host."""
        return self.max_length - self.num_tokens

    @property
    def length(self) -> int:
        """Tokens of the sequence, including those in flight."""
        return self.num_tokens + self.num_pending

    @property
    def needs_mask(self) -> bool:
        """True if a mask restricts its tokens. The host builds that mask once it knows all earlier tokens."""
        return self.constraint is not None or self.token_rules.needs_mask

    def banned_tokens(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """Return the tokens that the mask of the next token has to exclude."""
        has_grammar = self.constraint is not None
        banned = self.token_rules.banned_after(self.tokens[self.num_prompt_tokens :])
        if self.num_output < self.sampling.min_tokens:
            return banned | self.stop_ids | (eos_ids if has_grammar else frozenset())
        # A grammar allows EOS tokens wherever the output may end. With ignore_eos, it has to continue there.
        return banned | eos_ids if has_grammar and self.sampling.ignore_eos else banned

    @property
    def known_computed(self) -> Int32Array:
        """Tokens known to the host whose KV is in the pool, or will be once all planned steps are done."""
        return self.tokens[: self.num_computed]

    def record(self) -> RequestRecord:
        """Return the record of this request, which has ended."""
        assert self.finish_reason is not None
        return RequestRecord(
            request_id=self.request_id,
            finish_reason=self.finish_reason,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=max(self.num_cached, 0),
            num_output_tokens=self.num_output,
            num_preemptions=self.num_preemptions,
            arrival_s=self.arrival_s,
            scheduled_s=self.scheduled_s,
            first_token_s=self.first_token_s,
            finish_s=time.monotonic(),
        )
