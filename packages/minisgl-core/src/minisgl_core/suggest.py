"""Close matches for mistyped names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``Did you mean 'x'?`` for the name in `known` closest to `word`; empty where none is close."""
    by_folded = {name.casefold(): name for name in known}
    matches = difflib.get_close_matches(word.casefold(), by_folded, n=1)
    return f"Did you mean {by_folded[matches[0]]!r}?" if matches else ""
