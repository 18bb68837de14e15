"""Bytes of single tokens."""

import re
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Return the 256 characters that stand for bytes in byte-level vocabularies (GPT-2's encoder.py), with their bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


class TokenBytes(dict[int, bytes]):
    """Bytes of each token, which need not be whole characters: ``TokenBytes(tokenizer)[token_id]``.

    Ids without a token (in a padded vocabulary) are empty. Make one object per tokenizer, since it caches the bytes.

    Attributes:
        tokenizer: a transformers tokenizer.
        special_ids: tokens that decoding may leave out.
        is_byte_level: True for a byte-level tokenizer: the text of tokens is the concatenation of their bytes.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        added: dict[int, Any] = tokenizer.added_tokens_decoder
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        self.is_byte_level = type(decoder).__name__ == "ByteLevel"
        self._uses_byte_alphabet = "ByteLevel" in repr(decoder)
        # Without a backend, it is a SentencePiece model.
        self._has_byte_tokens = backend is None or "ByteFallback" in repr(decoder)
        self._has_spaces = backend is None or "Metaspace" in repr(decoder) or "▁" in repr(decoder)

    def __missing__(self, token_id: int) -> bytes:
        """Compute and cache the bytes of a token at its first lookup."""
        found = self[token_id] = self._compute(token_id)
        return found

    def _compute(self, token_id: int) -> bytes:
        token = self.tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if self._uses_byte_alphabet:
            is_bytes = all(char in _ALPHABET for char in token)
            return bytes(_ALPHABET[char] for char in token) if is_bytes else str(token).encode()
        if self._has_byte_tokens and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        return str(token.replace("▁", " ") if self._has_spaces else token).encode()


def max_token_bytes(tokenizer: Any) -> int:
    """Return an upper bound on the bytes of text that one token stands for; 0 if none is known.

    There is one if the tokenizer is byte-level, its normalizer is NFC or none, and no token also matches the spaces around it.
    The bound may be twice the maximum, because the byte alphabet writes some bytes as characters of two bytes. With NFC, which
    may shrink the text to a third before it is split into tokens, the bound is three times as large.
    """
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    # NFC turns three Hangul letters of 3 bytes into one syllable of 3 bytes.
    shrinks = {"NoneType": 1, "NFC": 3}.get(type(normalizer).__name__)
    strips = any(token.lstrip or token.rstrip for token in tokenizer.added_tokens_decoder.values())
    if not TokenBytes(tokenizer).is_byte_level or shrinks is None or strips:
        return 0
    return shrinks * max(len(token.encode()) for token in tokenizer.get_vocab())
