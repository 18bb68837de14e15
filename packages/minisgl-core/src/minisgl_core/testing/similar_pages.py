"""Pages of tokens that differ, but that a wrong comparison, such as of checksums, finds equal."""

import zlib
from collections.abc import Callable
from functools import cache
from itertools import chain, islice

import numpy as np

from minisgl_core.contracts.prefix_cache import TokenIds

_NUM_DRAWN = 1 << 18
"""Number of random pages among which collisions are searched. A 32-bit checksum has about eight colliding pairs."""
_NUM_PAIRS = 8
_CHECKSUMS: tuple[Callable[[bytes], int], ...] = (zlib.crc32, zlib.adler32, lambda page: hash(page) & 0xFFFFFFFF)
"""Checksums that a cache might compare instead of tokens. Collisions of 64-bit checksums are too rare to be found."""


@cache
def similar_pages(page_size: int) -> list[TokenIds]:
    """Return thousands of different pages, int32 [page_size] each, with ids up to 2^31 - 1.

    Among them are pages that differ in one bit of one token or in the order of their tokens, and pairs with equal checksums.
    """
    draw = np.random.default_rng(page_size)
    base = draw.integers(2**30, dtype=np.int32, size=page_size)
    positions = sorted({0, page_size // 2, page_size - 1})
    bits = np.repeat(base[None], 31 * len(positions), axis=0)
    for number, (position, bit) in enumerate((position, bit) for position in positions for bit in range(31)):
        bits[number, position] ^= np.int32(1 << bit)
    drawn = draw.integers(2**31, dtype=np.int64, size=(_NUM_DRAWN, page_size)).astype(np.int32)
    swapped = np.roll(drawn[:64], 1, axis=1), drawn[:64, ::-1]
    top = np.full((1, page_size), 2**31 - 1, np.int32)
    pages = [base[None], bits, top, np.zeros_like(top), drawn[:2048], *swapped, _colliding(drawn)]
    return list(np.unique(np.concatenate(pages), axis=0))


def _colliding(drawn: TokenIds) -> TokenIds:
    """Return up to `_NUM_PAIRS` colliding pairs of pages per checksum."""
    pages = [page.tobytes() for page in drawn]
    chosen: list[int] = []
    for checksum in _CHECKSUMS:
        first: dict[int, int] = {}
        pairs = ((first.setdefault(checksum(page), number), number) for number, page in enumerate(pages))
        chosen += chain.from_iterable(islice((pair for pair in pairs if pair[0] != pair[1]), _NUM_PAIRS))
    return drawn[chosen]
