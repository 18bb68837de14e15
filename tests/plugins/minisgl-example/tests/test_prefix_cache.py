"""Conformance tests of the prefix cache."""

from __future__ import annotations

from minisgl_example.prefix_cache import ExampleCache

from minisgl_core.testing.prefix_cache_kit import PrefixCacheTests


class TestExampleCache(PrefixCacheTests):
    """All of the kit's tests."""

    provider = ExampleCache
