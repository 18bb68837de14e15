"""Restrictions of a request's tokens by its `allowed_token_ids` and `bad_words`."""

from array import array
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from minisgl_core.contracts.grammar import Masks
from minisgl_core.kv.allocator import Int32Array
from minisgl_core.protocol.messages import Submit


@dataclass(slots=True)
class TokenRules:
    """Token restrictions of one request.

    Bad words are indexed by their second-to-last token, so that a step usually compares few of them with the output. If a client
    sends many with the same second-to-last token, comparing them as bytes is still fast.

    Attributes:
        allowed: the only tokens that may be generated; None for all.
        banned: tokens that are bad words by themselves.
        sequences: bad words of several tokens, indexed by their second-to-last token. Each is a pair of its prefix, which is
            the int32 bytes of all tokens but the last, and its last token.
        max_prefix_len: tokens of the longest prefix.
    """

    allowed: Int32Array | None
    banned: frozenset[int]
    sequences: dict[int, list[tuple[bytes, int]]] = field(default_factory=dict)
    max_prefix_len: int = 0
    _mask: Masks | None = None

    @classmethod
    def of(cls, submit: Submit) -> Self:
        """Return the rules of a request."""
        rules = cls(submit.allowed_ids, frozenset(each[0] for each in submit.bad_words if len(each) == 1))
        for sequence in submit.bad_words:
            if len(sequence) > 1:
                prefix = array("i", sequence[:-1]).tobytes()
                rules.sequences.setdefault(sequence[-2], []).append((prefix, sequence[-1]))
                rules.max_prefix_len = max(rules.max_prefix_len, len(sequence) - 1)
        return rules

    def allowed_mask(self, width: int) -> Masks | None:
        """Return the mask [width] of the allowed tokens, packed as grammars' masks are; None for all."""
        if self.allowed is not None and self._mask is None:
            bits = np.zeros(32 * width, np.uint8)
            bits[self.allowed] = 1
            self._mask = np.packbits(bits, bitorder="little").view(np.int32)
        return self._mask

    @property
    def needs_mask(self) -> bool:
        """True if a fixed set of banned tokens cannot express the rules."""
        return self.allowed is not None or bool(self.sequences)

    def banned_after(self, output: Int32Array) -> frozenset[int]:
        """Return the tokens that would complete a bad word after these output tokens."""
        if not self.sequences or not len(output):
            return self.banned
        candidates = self.sequences.get(int(output[-1]))
        if candidates is None:
            return self.banned
        known = output[-self.max_prefix_len :].tobytes()
        return self.banned.union([last for prefix, last in candidates if known.endswith(prefix)])
