"""Search for stop strings in a stream."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from functools import lru_cache
from typing import NamedTuple


class StopFinder:
    """Filter that passes a stream of text on and ends it before the first stop string.

    Text that may be the beginning of a stop string is held back until the next characters decide it. An Aho-Corasick automaton
    (Comm. ACM 18, 1975) of all stop strings makes this O(1) per character, however many and however long they are.
    """

    def __init__(self, stop: tuple[str, ...], include_found: bool = False) -> None:
        """`include_found`: keep the stop string in the output."""
        self._stop, self._include_found = stop, include_found
        self._first_chars = {text[0] for text in stop}
        self._automaton = _automaton(stop)
        self._node = 0
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that is ready, and the stop string that was found, or None.

        If two stop strings end together, the longer one is returned.
        """
        if not self._stop:
            return text, None
        self._held += text
        automaton, node = self._automaton, self._node
        for index, char in enumerate(text, start=len(self._held) - len(text)):
            if not node and char not in self._first_chars:
                continue
            node = automaton.next(node, ord(char))
            if number := automaton.found[node]:
                found = self._stop[number - 1]
                end = index + 1 if self._include_found else index + 1 - len(found)
                shown, self._held, self._node = self._held[:end], "", 0
                return shown, found
        keep = len(self._held) - automaton.depths[node]
        shown, self._held, self._node = self._held[:keep], self._held[keep:], node
        return shown, None

    def finish(self) -> str:
        """Return the text that was held back, after the stream has ended without a match."""
        shown, self._held = self._held, ""
        return shown


class _Automaton(NamedTuple):
    """Trie of the stop strings: each node is a prefix of some of them, and node 0 is the empty one. Nodes are sorted by depth.

    Attributes:
        chars: last character of each node. Children of a node follow each other, in order of these characters.
        first_children: first child of each node. Its children end before the first child of the next node.
        failures: node of the longest proper suffix of each node.
        depths: length of each node.
        found: number, from 1, of the longest stop string that is a suffix of each node; 0 for none.
    """

    chars: array[int]
    first_children: array[int]
    failures: array[int]
    depths: array[int]
    found: array[int]

    def child(self, node: int, char: int) -> int:
        """Return the child of a node with this character, or 0."""
        begin, end = self.first_children[node], self.first_children[node + 1]
        index = bisect_left(self.chars, char, begin, end)
        return index if index < end and self.chars[index] == char else 0

    def next(self, node: int, char: int) -> int:
        """Return the node of the longest suffix of a node's text and a character."""
        while not (child := self.child(node, char)) and node:
            node = self.failures[node]
        return child


@lru_cache(maxsize=64)  # outputs of one prompt have the same stop strings
def _automaton(stop: tuple[str, ...]) -> _Automaton:
    numbers = {text: number for number, text in enumerate(stop, start=1)}
    texts = sorted(numbers)
    automaton = _Automaton(array("I", [0]), array("I"), array("I", [0]), array("I", [0]), array("I", [0]))
    chars, first_children, failures, depths, found = automaton
    ranges = deque([(0, len(texts))])
    """Range of the texts that begin with each node, for nodes whose children have not been added yet."""
    node = 0
    while ranges:
        (low, high), depth = ranges.popleft(), depths[node]
        first_children.append(len(chars))
        if low < high and len(texts[low]) == depth:
            low += 1
        while low < high:
            char = texts[low][depth]
            end = low + 1
            while end < high and texts[end][depth] == char:
                end += 1
            code = ord(char)
            failure = automaton.next(failures[node], code) if node else 0
            chars.append(code)
            failures.append(failure)
            depths.append(depth + 1)
            found.append(numbers[texts[low]] if len(texts[low]) == depth + 1 else found[failure])
            ranges.append((low, end))
            low = end
        node += 1
    first_children.append(len(chars))
    return automaton
