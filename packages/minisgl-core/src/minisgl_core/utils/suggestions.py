"""Suggestions for mistyped names."""

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str], min_similarity: float = 0.6) -> str:
    """Return ``Did you mean 'x'?`` with the name in `known` that is closest to `word`; empty if none is close.

    `min_similarity` is the fraction of the characters that must match, as difflib counts them.
    """
    by_folded = {name.casefold(): name for name in known}
    matches = difflib.get_close_matches(word.casefold(), by_folded, n=1, cutoff=min_similarity)
    return f"Did you mean {by_folded[matches[0]]!r}?" if matches else ""
