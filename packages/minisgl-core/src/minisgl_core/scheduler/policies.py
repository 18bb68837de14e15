"""Scheduling policies that ship with minisgl."""

from collections.abc import Callable, Sequence
from itertools import accumulate

from minisgl_core.contracts.policy import Policy, RequestView

_MAX_MATCHED_TOKENS = 1 << 20
"""Maximum number of prompt tokens that are matched per step, which takes milliseconds."""


class FirstComeFirstServed(Policy):
    """Order by priority, then by arrival."""

    def order(
        self, waiting: Sequence[RequestView], running: Sequence[RequestView], num_cached: Callable[[RequestView], int]
    ) -> Sequence[RequestView]:
        return waiting


class LongestPrefixMatch(Policy):
    """Order by priority, then by longest cached prefix (SGLang, arXiv 2312.07104), then by arrival.

    Only the first `window` waiting requests are matched, and fewer if their prompts are very long. This bounds the time of each
    step, as the requests are matched again until they are admitted.
    """

    window = 128

    def order(
        self, waiting: Sequence[RequestView], running: Sequence[RequestView], num_cached: Callable[[RequestView], int]
    ) -> Sequence[RequestView]:
        totals = accumulate(request.num_prompt_tokens for request in waiting[: self.window])
        size = sum(total <= _MAX_MATCHED_TOKENS for total in totals)
        head = sorted(waiting[:size], key=lambda request: (request.priority, -num_cached(request), request.arrival))
        return [*head, *waiting[size:]]


class LongestOutputFirst(Policy):
    """Order by priority, then by most remaining output tokens (SGLang's ``longest-output-first``), then by arrival.

    This policy is for offline batches whose output lengths are known. The longest request starts first, as in Graham's rule
    for tasks of known length (SIAM J. Appl. Math. 17(2), 1969), so that few steps at the end have few requests. With a small
    ``--max-prefill-length``, later prompts share steps with decodes, so that these steps read the weights once for both. It
    does not suit a server: short requests wait for all longer ones.
    """

    def order(
        self, waiting: Sequence[RequestView], running: Sequence[RequestView], num_cached: Callable[[RequestView], int]
    ) -> Sequence[RequestView]:
        return sorted(waiting, key=lambda request: (request.priority, -request.max_tokens_left, request.arrival))
