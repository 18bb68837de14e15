"""Estimates of the duration of steps, from the steps before.

The estimate is the duration of the decodes alone, plus a fixed time and a time per token if there are prompt tokens. They come
from medians of the last steps, so that single slow steps, such as the first ones, do not count.
"""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median, median_low

_NUM_DECODE_STEPS = 5
"""Recent decode steps whose median is an estimate."""
_NUM_PROMPT_STEPS = 16
"""Recent steps with prompt tokens that give the fixed time and the time per token."""
_DECODES_PER_GROUP = 8
"""Decode steps with similar numbers of requests share an estimate."""
_MIN_TOKENS = 16
"""Fewest prompt tokens of a step that updates the estimates."""
_MAX_GROWTH = 4
"""The limit of prompt tokens is at most this many times the most that a recent step had, as the estimate is for such numbers."""
MIN_CHUNK = 64
"""Smallest limit of prompt tokens per step, and the limit until a step with prompt tokens has run."""


class StepTimes:
    """Durations of recent steps.

    Args:
        max_step_s: longest step while requests decode, in seconds; 0 for no limit.
    """

    def __init__(self, max_step_s: float = 0.0) -> None:
        self._max_step_s = max_step_s
        self._decode_s: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_NUM_DECODE_STEPS))
        self._prompts: deque[tuple[int, float]] = deque(maxlen=_NUM_PROMPT_STEPS)
        """(prompt tokens, seconds more than the decodes alone) of recent steps."""
        self._token_s = 0.0
        """Time per prompt token."""
        self._fixed_s = 0.0
        """Time that prompt tokens add whatever their number, such as the launch of kernels on a busy host."""

    def observe(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """Record the duration of a step."""
        if num_prompt_tokens == 0:
            self._decode_s[_group(num_decodes)].append(seconds)
        elif num_prompt_tokens >= _MIN_TOKENS:
            self._prompts.append((num_prompt_tokens, max(seconds - self._decode_time(num_decodes), 0.0)))
            self._fit()

    def predict(self, num_decodes: int, num_prompt_tokens: int) -> float:
        """Return the expected duration of a step in seconds, 0 if unknown."""
        decode_s = self._decode_time(num_decodes)
        return decode_s + self._fixed_s + num_prompt_tokens * self._token_s if num_prompt_tokens else decode_s

    def prompt_tokens(self, num_decodes: int, most: int) -> int:
        """Return how many prompt tokens, at most `most`, a step with these decodes may have.

        Their time is at least that of the decodes and the fixed time. So prompts progress even if these alone reach the limit,
        and chunks do not shrink when that would not make steps shorter.
        """
        if not num_decodes or not self._max_step_s:
            return most
        if not self._prompts:
            return min(most, MIN_CHUNK)
        base_s = self._decode_time(num_decodes) + self._fixed_s
        seconds = max(self._max_step_s - base_s, base_s)
        most = min(most, max(MIN_CHUNK, _MAX_GROWTH * max(self._prompts)[0]))
        return most if seconds >= most * self._token_s else min(most, max(MIN_CHUNK, int(seconds / self._token_s)))

    def _fit(self) -> None:
        """Fit a line through the medians of the steps with fewer and with more prompt tokens.

        If these numbers are similar, the time per token stays, and the fixed time changes.
        """
        steps = sorted(self._prompts)
        if len(steps) < _NUM_PROMPT_STEPS // 2:
            self._token_s = median(seconds / tokens for tokens, seconds in steps)
            return
        (few, few_s), (many, many_s) = (
            map(median_low, zip(*part, strict=True)) for part in (steps[: len(steps) // 2], steps[len(steps) // 2 :])
        )
        if many >= 2 * few:
            self._token_s = max((many_s - few_s) / (many - few), 0.0)
        self._fixed_s = max(0.0, (few_s + many_s - self._token_s * (few + many)) / 2)

    def _decode_time(self, num_decodes: int) -> float:
        """Return the expected duration of a decode step; 0 without decodes or if unknown."""
        known = self._decode_s.get(_group(num_decodes)) if num_decodes else None
        return median(known) if known else 0.0


def _group(num_decodes: int) -> int:
    return -(-num_decodes // _DECODES_PER_GROUP)
