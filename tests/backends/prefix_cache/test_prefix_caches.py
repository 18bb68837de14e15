from __future__ import annotations

import numpy as np
import pytest

from minisgl_backends.prefix_cache.naive import NaivePrefixCache
from minisgl_backends.prefix_cache.radix import RadixPrefixCache
from minisgl_core.testing.prefix_cache_kit import PrefixCacheTests


class TestNaive(PrefixCacheTests):
    provider = NaivePrefixCache
    takes_all = False


class TestRadix(PrefixCacheTests):
    provider = RadixPrefixCache

    def test_evict_returns_exactly_the_requested_pages(self) -> None:
        cache = RadixPrefixCache(4)
        tokens = np.arange(40, dtype=np.int32)
        cache.insert(tokens, np.arange(10, dtype=np.int32))
        assert cache.evict(3).tolist() == [7, 8, 9]
        assert cache.match(tokens).pages.tolist() == list(range(7))

    def test_handles_of_evicted_prefixes_are_refused(self) -> None:
        cache = RadixPrefixCache(1)
        handle = cache.insert(np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int32)).handle
        cache.evict(1)
        with pytest.raises(AssertionError, match="evicted"):
            cache.lock(handle)

    def test_other_integer_types_match_too(self) -> None:
        cache = RadixPrefixCache(2)
        cache.insert(np.arange(4), np.arange(2))
        assert cache.match(np.arange(4, dtype=np.int64)).pages.tolist() == [0, 1]
