"""Suggestions for mistyped names, and for names of vLLM and SGLang."""

import difflib
import tomllib
from collections.abc import Iterable
from pathlib import Path

OTHER_NAMES = tomllib.loads((Path(__file__).parent / "other_names.toml").read_text("utf-8"))
"""Lists of names of vLLM, SGLang or another endpoint, by the name here that has their meaning."""
WITHOUT_COUNTERPART: dict[str, str] = OTHER_NAMES.pop("without_counterpart")
"""Sentence for each flag of vLLM or SGLang that has no counterpart: why it is not needed, or that it is not supported."""


def other_name(word: str, known: Iterable[str]) -> str | None:
    """Return the name in `known` that has the meaning of `word` in vLLM, SGLang or another endpoint."""
    return next((name for name in known if word.casefold() in OTHER_NAMES.get(name, ())), None)


def option_hint(word: str, known: Iterable[str]) -> str:
    """Return what to use instead of an unknown option, or why it does not exist; see `did_you_mean`."""
    return WITHOUT_COUNTERPART.get(word.casefold()) or did_you_mean(word, known)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``Did you mean 'x'?`` with the name in `known` that is closest to `word`; empty if none is close."""
    by_folded = {name.casefold(): name for name in known}
    other = other_name(word, by_folded.values())
    matches = difflib.get_close_matches(word.casefold(), by_folded, n=1)
    name = other or (by_folded[matches[0]] if matches else None)
    return f"Did you mean {name!r}?" if name else ""
