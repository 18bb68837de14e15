"""Estimates of the duration of steps, from the steps before.

The duration of a step is ``max(weights, tokens * token) + attention``:

- ``weights`` is the duration of the smallest decode steps, which read all weights for few tokens,
- ``token`` is the time per token of steps with prompts,
- ``attention`` is by how much decode steps with as many requests exceed ``weights``, since they read K and V.

All are medians of the last few steps, so that single slow steps do not count.
"""

from collections import defaultdict, deque
from statistics import median

_NUM_KEPT = 5
"""Recent steps whose median is an estimate."""
_DECODES_PER_GROUP = 8
"""Decode steps share an estimate if their numbers of requests round up to the same multiple of this."""
_LIMITED_BY_WEIGHTS = 1.25
"""A step's GEMMs may be limited by reading the weights, not by tokens, if they take less than this times as long as that."""
FIRST_CHUNK = 64
"""Limit of prompt tokens per step until a step with prompt tokens has run."""
MIN_CHUNK = 32
"""Smallest limit of prompt tokens per step. Long contexts on a CPU reach it: 64 tokens after 7,800 take SmolLM2-135M 0.4 s."""


class StepTimes:
    """Durations of recent steps. `max_step_s` is the longest step while requests decode, in seconds; 0 for no limit."""

    def __init__(self, max_step_s: float = 0.0) -> None:
        self._max_step_s = max_step_s
        self._decode_s: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_NUM_KEPT))
        self._token_s: deque[float] = deque(maxlen=_NUM_KEPT)
        self._launch_s = 0.0
        """Time to launch the newest step with prompt tokens."""

    def observe(
        self,
        num_decodes: int,
        num_prompt_tokens: int,
        seconds: float,
        launch_s: float = 0.0,
        *,
        is_upper_bound: bool = False,
    ) -> None:
        """Record the duration of a step, and the time that the host took to launch it; 0 if steps do not overlap.

        With `is_upper_bound`, the step may have been faster.
        """
        if num_prompt_tokens == 0:
            _append(self._decode_s[_group(num_decodes)], seconds, is_upper_bound)
            return
        self._launch_s = launch_s
        gemm_s = max(seconds - self._attention_time(num_decodes), 0.0)
        token_s = gemm_s / (num_decodes + num_prompt_tokens)
        is_limited_by_launch = launch_s > seconds / 2
        is_limited_by_weights = gemm_s < _LIMITED_BY_WEIGHTS * self._weights_time()
        _append(self._token_s, token_s, is_upper_bound or is_limited_by_launch or is_limited_by_weights)

    def predict(self, num_decodes: int, num_prompt_tokens: int) -> float:
        """Return the expected duration of a step in seconds, 0 if unknown."""
        if num_prompt_tokens == 0 or not self._token_s:
            return self._decode_time(num_decodes)
        tokens_s = (num_decodes + num_prompt_tokens) * median(self._token_s)
        return self._attention_time(num_decodes) + max(self._weights_time(), tokens_s)

    def prompt_tokens(self, num_decodes: int, limit: int) -> int:
        """Return how many prompt tokens, at most `limit`, a step with these decodes may have.

        Prompts get at least as much time as the decodes, so that they progress even if the decodes alone reach the limit. They
        also get at least the time of a launch, since fewer tokens would not make a step shorter than that.
        """
        if not num_decodes or not self._max_step_s:
            return limit
        if not self._token_s:
            return min(limit, FIRST_CHUNK)
        decode_s = self._decode_time(num_decodes)
        step_s = max(self._max_step_s, decode_s + max(decode_s, self._launch_s))
        tokens_s, token_s = step_s - self._attention_time(num_decodes), median(self._token_s)
        if tokens_s >= (num_decodes + limit) * token_s:
            return limit
        return min(limit, max(MIN_CHUNK, int(tokens_s / token_s) - num_decodes))

    def _decode_time(self, num_decodes: int) -> float:
        """Return the expected duration of a decode step; 0 without decodes or if unknown."""
        known = self._decode_s.get(_group(num_decodes)) if num_decodes else None
        return median(known) if known else 0.0

    def _weights_time(self) -> float:
        """Return the duration of the smallest known decode steps; 0 if unknown."""
        return median(self._decode_s[min(self._decode_s)]) if self._decode_s else 0.0

    def _attention_time(self, num_decodes: int) -> float:
        """Return by how much a decode step takes longer than the smallest ones."""
        return max(self._decode_time(num_decodes) - self._weights_time(), 0.0)


def _append(times: deque[float], seconds: float, is_upper_bound: bool) -> None:
    """Add a time. An upper bound is added only if it is below the estimate, or the first."""
    if not is_upper_bound or not times or seconds < median(times):
        times.append(seconds)


def _group(num_decodes: int) -> int:
    return -(-num_decodes // _DECODES_PER_GROUP)
