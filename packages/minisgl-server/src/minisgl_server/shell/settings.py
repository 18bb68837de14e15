"""Settings of the shell's ``/set NAME VALUE``."""

import json
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
    """Return the name and value of a line such as ``temperature 0.2``; the value ``default`` becomes None."""
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
