"""One request as the scheduler sees it."""

from __future__ import annotations

import time

import numpy as np

from minisgl_core.contracts.prefix_cache import CacheNamespace
from minisgl_core.messages import Submit, TokenLogprobs
from minisgl_core.plugins.hookspecs import RequestRecord
from minisgl_core.scheduler.constraints import Constraint
from minisgl_core.scheduler.growing_array import GrowingArray, Int32
from minisgl_core.scheduler.token_rules import TokenRules


class Request:
    """State of a request from arrival to release.

    Of a request's tokens, a prefix has been computed and the rest waits. With overlap, the last token may be in flight:
    sampled by a launched step, not yet known to the host.

        tokens   |<-------------- len(tokens) ------------->|<----- num_pending ----->|
        KV       |<-- num_computed -->|<-- to compute ------------------------------->|
        pages    |<-- num_shared: the cache's, locked -->|<-- the request's own -->|

    Attributes:
        request_id: the client's name for it.
        tokens: prompt and output tokens known to the host.
        num_prompt: how many of them are the prompt.
        num_pending: tokens sampled by steps in flight: 0 or 1 when a step is planned, 2 until the earlier one is processed.
        num_computed: tokens whose KV is in the pool once the launched steps are done.
        num_cached: prompt tokens found in the cache when the request was first admitted, for the usage report.
        pages: page ids in order; those up to `num_shared` belong to the prefix cache and are locked through `handle`.
        namespace: of its prefix in the cache, by salt and adapter.
        row: page-table row; 0 while waiting.
        num_inflight: launched steps that include the request and are not processed yet.
        arrival_s, scheduled_s, first_token_s, num_preemptions: for the request's record; times are of ``time.monotonic()``.
        constraint: the grammar that the output follows, if any; it knows the tokens that the host knows.
        token_rules: the tokens that it may generate besides, if that is restricted.
        finish_reason: set once; the request is released when `num_inflight` is 0.
    """

    __slots__ = (
        "arrival",
        "arrival_s",
        "bias_ids",
        "bias_values",
        "constraint",
        "finish_reason",
        "first_token_s",
        "handle",
        "max_length",
        "namespace",
        "num_cached",
        "num_computed",
        "num_inflight",
        "num_pending",
        "num_preemptions",
        "num_prompt",
        "num_shared",
        "pages",
        "penalties_sent",
        "priority",
        "prompt_logprobs",
        "request_id",
        "row",
        "sampling",
        "scheduled_s",
        "seed",
        "stop_ids",
        "token_rules",
        "tokens",
        "user",
        "worker",
    )

    def __init__(
        self,
        submit: Submit,
        *,
        arrival: int,
        seed: int,
        eos_ids: frozenset[int],
        constraint: Constraint | None = None,
    ) -> None:
        """`seed`: used where the request has none."""
        sampling = submit.sampling
        self.request_id, self.worker, self.priority, self.sampling = (
            submit.request_id,
            submit.worker,
            submit.priority,
            sampling,
        )
        self.user, self.namespace = submit.user, CacheNamespace(submit.cache_salt, submit.adapter_id)
        self.arrival = arrival
        self.arrival_s = time.monotonic()
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.num_preemptions = 0
        self.tokens = GrowingArray(submit.token_ids)
        self.num_prompt = len(submit.token_ids)
        self.max_length = self.num_prompt + sampling.max_tokens
        self.seed = np.uint64((seed if sampling.seed is None else sampling.seed) % 2**64)
        self.stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos_ids)
        self.bias_ids = np.fromiter(sampling.logit_bias.keys(), dtype=np.int32)
        self.bias_values = np.fromiter(sampling.logit_bias.values(), dtype=np.float32)
        self.token_rules = TokenRules.of(submit)
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None if sampling.prompt_logprobs is None else [None]
        self.constraint = constraint
        self.num_cached = -1
        self.finish_reason: str | None = None
        self.reset()

    def reset(self) -> None:
        """Forget everything that was computed; the tokens stay. For preemption."""
        self.num_computed = self.num_pending = self.num_inflight = self.num_shared = self.row = 0
        self.pages = GrowingArray(np.empty(0, np.int32))
        self.handle: object = None
        self.penalties_sent = False
        if self.prompt_logprobs is not None and self.num_output == 0:
            self.prompt_logprobs = [None]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, under the name that policies know."""
        return self.num_prompt

    @property
    def num_output(self) -> int:
        """Output tokens known to the host."""
        return len(self.tokens) - self.num_prompt

    @property
    def max_tokens_left(self) -> int:
        """Output tokens that the host does not know yet, at most."""
        return self.max_length - len(self.tokens)

    @property
    def length(self) -> int:
        """Tokens of the sequence, those in flight included."""
        return len(self.tokens) + self.num_pending

    @property
    def is_decoding(self) -> bool:
        """Whether all but the newest token is computed and that one was sampled."""
        return self.num_computed + 1 == self.length and self.length > self.num_prompt

    @property
    def wants_step(self) -> bool:
        """Whether another step could give it another token."""
        return self.finish_reason is None and self.length < self.max_length

    @property
    def needs_mask(self) -> bool:
        """Return if its tokens are restricted by a mask, which the host makes once it knows the tokens before."""
        return self.constraint is not None or (self.token_rules is not None and self.token_rules.needs_mask)

    def banned_tokens(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """Tokens that a mask is to leave out at the next place that the host does not know."""
        rules, has_grammar = self.token_rules, self.constraint is not None
        banned: frozenset[int] = (
            frozenset() if rules is None else rules.banned_after(self.tokens.view[self.num_prompt :])
        )
        if self.num_output < self.sampling.min_tokens:
            return banned | self.stop_ids | (eos_ids if has_grammar else frozenset())
        return banned | eos_ids if has_grammar and self.sampling.ignore_eos else banned

    @property
    def known_computed(self) -> Int32:
        """Tokens that the host knows and whose KV is (or will be, once the launched steps are done) in the pool."""
        return self.tokens.view[: self.num_computed]

    def record(self, finish_reason: str) -> RequestRecord:
        """What became of it, now that it has ended."""
        return RequestRecord(
            request_id=self.request_id,
            finish_reason=finish_reason,
            num_prompt_tokens=self.num_prompt,
            num_cached_tokens=max(self.num_cached, 0),
            num_output_tokens=self.num_output,
            num_preemptions=self.num_preemptions,
            arrival_s=self.arrival_s,
            scheduled_s=self.scheduled_s,
            first_token_s=self.first_token_s,
            finish_s=time.monotonic(),
        )
