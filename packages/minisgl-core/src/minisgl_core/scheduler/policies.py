"""The scheduling policies that come with minisgl."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minisgl_core.contracts.policy import Policy, RequestView


class FirstComeFirstServed(Policy):
    """By priority, then arrival."""

    def order(
        self,
        waiting: Sequence[RequestView],
        running: Sequence[RequestView],
        num_cached: Callable[[RequestView], int],
    ) -> Sequence[RequestView]:
        return waiting


class LongestPrefixMatch(Policy):
    """By priority, then the longest cached prefix (SGLang, arXiv 2312.07104), then arrival.

    Looks only at the first `window` waiting requests, so that a long queue does not cost a cache match each.
    """

    window = 128

    def order(
        self,
        waiting: Sequence[RequestView],
        running: Sequence[RequestView],
        num_cached: Callable[[RequestView], int],
    ) -> Sequence[RequestView]:
        head = sorted(
            waiting[: self.window], key=lambda request: (request.priority, -num_cached(request), request.arrival)
        )
        return [*head, *waiting[self.window :]]


class LongestOutputFirst(Policy):
    """By priority, then the most output tokens that a request may still ask for (SGLang's ``lof``), then arrival.

    For batches whose outputs' lengths are known: the longest start first, as in Graham's rule for tasks of known length (SIAM
    J. Appl. Math. 17(2), 1969), so that few steps at the end have few requests. With a small ``--max-prefill-length`` later
    prompts share steps with decodes, which read the same weights. Not for serving: short requests wait for all longer ones.
    """

    def order(
        self,
        waiting: Sequence[RequestView],
        running: Sequence[RequestView],
        num_cached: Callable[[RequestView], int],
    ) -> Sequence[RequestView]:
        return sorted(waiting, key=lambda request: (request.priority, -request.max_tokens_left, request.arrival))
