"""Estimates of the duration of steps, from the steps before.

The estimate is the duration of the decodes alone, plus a time per prompt token. Both are medians of the last few steps,
so that single slow steps, such as the first ones, do not count.
"""

from collections import defaultdict, deque
from statistics import median

_NUM_KEPT = 5
"""Recent steps whose median is an estimate."""
_DECODES_PER_GROUP = 8
"""Decode steps share an estimate if their numbers of requests round up to the same multiple of this."""
_MIN_TOKENS = 16
"""Minimum number of prompt tokens of a step that updates the estimate of the time per prompt token."""
MIN_CHUNK = 64
"""Smallest limit of prompt tokens per step, and the limit until a step with prompt tokens has run."""


class StepTimes:
    """Durations of recent steps.

    Args:
        max_step_s: longest step while requests decode, in seconds; 0 for no limit.
    """

    def __init__(self, max_step_s: float = 0.0) -> None:
        self._max_step_s = max_step_s
        self._decode_s: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_NUM_KEPT))
        self._token_s: deque[float] = deque(maxlen=_NUM_KEPT)
        self._launch_s = 0.0
        """Time to launch the newest step with prompt tokens."""

    def observe(self, num_decodes: int, num_prompt_tokens: int, seconds: float, launch_s: float = 0.0) -> None:
        """Record the duration of a step.

        Args:
            num_decodes: decodes of the step.
            num_prompt_tokens: its prompt tokens.
            seconds: its duration.
            launch_s: time that the host took to launch it; 0 if steps do not overlap.
        """
        if num_prompt_tokens == 0:
            self._decode_s[_group(num_decodes)].append(seconds)
            return
        self._launch_s = launch_s
        if num_prompt_tokens >= _MIN_TOKENS:
            token_s = max(seconds - self._decode_time(num_decodes), 0.0) / num_prompt_tokens
            if launch_s > seconds / 2 and self._token_s:
                # The device has waited for the launch, and might have been faster.
                token_s = min(token_s, median(self._token_s))
            self._token_s.append(token_s)

    def predict(self, num_decodes: int, num_prompt_tokens: int) -> float:
        """Return the expected duration of a step in seconds, 0 if unknown."""
        decode_s = self._decode_time(num_decodes)
        if num_prompt_tokens == 0 or not self._token_s:
            return decode_s
        return decode_s + num_prompt_tokens * median(self._token_s)

    def prompt_tokens(self, num_decodes: int, limit: int) -> int:
        """Return how many prompt tokens, at most `limit`, a step with these decodes may have.

        Prompts get at least as much time as the decodes, so that they progress even if the decodes alone reach the limit. They
        also get at least the time of a launch, since fewer tokens would not make a step shorter than that.
        """
        if not num_decodes or not self._max_step_s:
            return limit
        if not self._token_s:
            return min(limit, MIN_CHUNK)
        decode_s, token_s = self._decode_time(num_decodes), median(self._token_s)
        seconds = max(self._max_step_s - decode_s, decode_s, self._launch_s)
        return limit if seconds >= limit * token_s else min(limit, max(MIN_CHUNK, int(seconds / token_s)))

    def _decode_time(self, num_decodes: int) -> float:
        """Return the expected duration of a decode step; 0 without decodes or if unknown."""
        known = self._decode_s.get(_group(num_decodes)) if num_decodes else None
        return median(known) if known else 0.0


def _group(num_decodes: int) -> int:
    return -(-num_decodes // _DECODES_PER_GROUP)
