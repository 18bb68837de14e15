"""What single tokens stand for."""

from __future__ import annotations

import re
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The 256 characters that byte-level vocabularies write bytes with (GPT-2's encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


class TokenBytes(dict[int, bytes]):
    """The bytes of each token, which need not be whole characters: ``TokenBytes(tokenizer)[token_id]``.

    Ids without a token (a vocabulary padded for speed) are empty. Made once for a tokenizer: it remembers.

    Attributes:
        tokenizer: a transformers tokenizer.
        special_ids: tokens that decoding may leave out.
        make_up_texts: whether the text of tokens is their bytes one after another, which is so for byte-level tokenizers.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self._added: dict[int, Any] = tokenizer.added_tokens_decoder
        self.special_ids = frozenset(index for index, token in self._added.items() if token.special)
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self.make_up_texts = type(decoder).__name__ == "ByteLevel"
        self._is_byte_level = "ByteLevel" in repr(decoder)

    def __missing__(self, token_id: int) -> bytes:
        """Called where a token is looked up for the first time."""
        found = self[token_id] = self._compute(token_id)
        return found

    def _compute(self, token_id: int) -> bytes:
        token = self.tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if self._is_byte_level and all(char in _ALPHABET for char in token):
            return bytes(_ALPHABET[char] for char in token)
        if token_id in self._added:
            return str(token).encode()
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        return str(token if self._is_byte_level else token.replace("▁", " ")).encode()


def max_token_bytes(tokenizer: Any) -> int:
    """Most bytes of text that one token stands for; 0 where it is not known, or a token may stand for any number of them.

    It is known where a tokenizer is byte-level and no token takes the spaces around it, too.
    """
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    shrinks = {"NoneType": 1, "NFC": 3}.get(type(normalizer).__name__)  # three letters of Hangul become one syllable
    strips = any(token.lstrip or token.rstrip for token in tokenizer.added_tokens_decoder.values())
    if not TokenBytes(tokenizer).make_up_texts or shrinks is None or strips:
        return 0
    return shrinks * max(len(token.encode()) for token in tokenizer.get_vocab())
