"""``/set NAME VALUE``, and what a turn of the conversation took."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from minisgl_core.errors import InvalidValueError
from minisgl_core.sampling_params import SamplingParams
from minisgl_core.suggest import did_you_mean

NAMES = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "seed", "stop", "ignore_eos"),
)
"""What may be set: sampling parameters that make sense for one answer of text."""


def parse_setting(text: str) -> tuple[str, Any]:
    """The name and the value of a line such as ``temperature 0.2``; None for the value ``default``.

    Raises:
        InvalidValueError: there is no such parameter, or the value is not allowed.
    """
    name, _, word = text.partition(" ")
    if name not in NAMES:
        raise InvalidValueError("/set", name, f"one of {', '.join(NAMES)}", did_you_mean(name, NAMES))
    word = word.strip()
    if word in ("", "default"):
        return name, None
    try:
        value = json.loads(word)
    except ValueError:
        value = word
    if name == "stop" and not isinstance(value, (str, list)):
        value = word  # a text that happens to be JSON, such as 5 or null
    SamplingParams(**{"max_tokens": 2**31, name: value})
    return name, value


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one answer took.

    Attributes:
        first_s: until its first text; None where there was none.
        total_s: until its end.
        num_prompt, num_cached, num_output: tokens; None where nobody told, as for an answer that was stopped.
    """

    first_s: float | None
    total_s: float
    num_prompt: int | None = None
    num_cached: int | None = None
    num_output: int | None = None

    def describe(self) -> str:
        """One line."""
        parts = [] if self.first_s is None else [f"{self.first_s:.3f} s to the first token"]
        if self.num_output is not None and self.first_s is not None and self.num_output > 1:
            decode_s = max(self.total_s - self.first_s, 1e-9)
            parts.append(f"{(self.num_output - 1) / decode_s:.1f} tok/s")
        if self.num_prompt is not None:
            cached = "" if self.num_cached is None else f" ({self.num_cached} cached)"
            parts.append(f"{self.num_prompt} prompt tokens{cached}, {self.num_output} output tokens")
        return f"[{', '.join([*parts, f'{self.total_s:.3f} s'])}]"
