"""Search for stop strings in a stream."""

from array import array
from functools import lru_cache

from minisgl_core.sampling_params import MAX_STOPS


class StopFinder:
    """Filter that passes a stream of text on and ends it before the first stop string.

    Text that may be the beginning of a stop string is held back until that is decided. One Knuth-Morris-Pratt automaton (SIAM
    J. Comput. 6, 1977) per stop string makes this O(1) per character, however long the stop strings are. Only the automata that
    have matched a character, or whose string begins with the next one, take a step.
    """

    def __init__(self, stop: tuple[str, ...], include_found: bool = False) -> None:
        """`include_found`: keep the stop string in the output."""
        self._stop, self._include_found = stop, include_found
        self._failures = [_failures(text) for text in stop]
        self._by_first_char: dict[str, list[int]] = {}
        for index, text in enumerate(stop):
            self._by_first_char.setdefault(text[0], []).append(index)
        self._matched: dict[int, int] = {}
        """Matched characters of each stop string, by its index; those without any are left out."""
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that is ready, and the stop string that was found, or None: the longer one if two end together."""
        if not self._stop:
            return text, None
        self._held += text
        for index, char in enumerate(text, start=len(self._held) - len(text)):
            found = self._advance(char) if self._matched or char in self._by_first_char else None
            if found is not None:
                end = index + 1 if self._include_found else index + 1 - len(found)
                shown, self._held = self._held[:end], ""
                return shown, found
        keep = len(self._held) - max(self._matched.values(), default=0)
        shown, self._held = self._held[:keep], self._held[keep:]
        return shown, None

    def finish(self) -> str:
        """Return the text that was held back, after the stream has ended without a match."""
        shown, self._held = self._held, ""
        return shown

    def _advance(self, char: str) -> str | None:
        found: str | None = None
        before, self._matched = self._matched, {}
        for index in {*before, *self._by_first_char.get(char, ())}:
            stop, failures, matched = self._stop[index], self._failures[index], before.get(index, 0)
            while matched and stop[matched] != char:
                matched = failures[matched - 1]
            if stop[matched] == char:
                matched += 1
            if matched == len(stop):
                matched = failures[matched - 1]
                if found is None or len(stop) > len(found):
                    found = stop
            if matched:
                self._matched[index] = matched
        return found


# Outputs of one prompt have the same stop strings. A table of 32,768 characters takes 8 ms.
@lru_cache(maxsize=MAX_STOPS)
def _failures(text: str) -> "array[int]":
    """Return, for each prefix of `text`, the length of its longest proper prefix that is also its suffix."""
    table = array("I", bytes(4 * len(text)))
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = table[length - 1]
        if text[index] == text[length]:
            length += 1
        table[index] = length
    return table
