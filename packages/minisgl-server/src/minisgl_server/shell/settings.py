"""Settings of the shell's ``/set NAME VALUE``, and the statistics of a turn."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from minisgl_core.errors import InvalidValueError
from minisgl_core.sampling_params import SamplingParams
from minisgl_core.utils.suggestions import did_you_mean

NAMES = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "seed", "stop", "ignore_eos"),
)
"""Sampling parameters that ``/set`` accepts: those that apply to a single text response."""


def parse_setting(text: str) -> tuple[str, Any]:
    """Return the name and value of a line such as ``temperature 0.2``; the value ``default`` becomes None.

    Raises:
        InvalidValueError: there is no such parameter, or the value is not allowed.
    """
    name, _, rest = text.partition(" ")
    if name not in NAMES:
        raise InvalidValueError("/set", name, f"one of {', '.join(NAMES)}", did_you_mean(name, NAMES))
    rest = rest.strip()
    if rest in ("", "default"):
        return name, None
    try:
        value = json.loads(rest)
    except ValueError:
        value = rest
    if name == "stop" and not isinstance(value, (str, list)):
        value = rest  # a text that happens to be JSON, such as 5 or null
    SamplingParams(**{"max_tokens": 2**31, name: value})
    return name, value


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStats:
    """Times and token counts of one response.

    Attributes:
        first_s: time to its first text; None if there was none.
        total_s: time to its end.
        num_prompt: prompt tokens; None if they are not known, such as after Ctrl-C.
        num_cached: prompt tokens from the prefix cache, or None.
        num_output: output tokens, or None.
    """

    first_s: float | None
    total_s: float
    num_prompt: int | None = None
    num_cached: int | None = None
    num_output: int | None = None

    def describe(self) -> str:
        """Return the statistics as one line."""
        parts = [] if self.first_s is None else [f"{self.first_s:.3f} s to the first token"]
        if self.num_output is not None and self.first_s is not None and self.num_output > 1:
            decode_s = max(self.total_s - self.first_s, 1e-9)
            parts.append(f"{(self.num_output - 1) / decode_s:.1f} tok/s")
        if self.num_prompt is not None:
            cached = "" if self.num_cached is None else f" ({self.num_cached} cached)"
            parts.append(f"{self.num_prompt} prompt tokens{cached}, {self.num_output} output tokens")
        return f"[{', '.join([*parts, f'{self.total_s:.3f} s'])}]"
