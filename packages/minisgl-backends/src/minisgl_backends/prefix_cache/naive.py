"""Prefix cache that caches nothing: every prompt is computed from its first token."""

import numpy as np

from minisgl_core.contracts.prefix_cache import (
    DEFAULT_NAMESPACE,
    CacheNamespace,
    PageIds,
    PrefixCache,
    PrefixInsert,
    PrefixMatch,
    TokenIds,
)
from minisgl_core.errors import CacheFullError

_NO_PAGES: PageIds = np.empty(0, np.int32)


class NaivePrefixCache(PrefixCache):
    """Cache that never matches and never keeps a page: all pages stay with their requests. Handles are None."""

    def match(self, token_ids: TokenIds, namespace: CacheNamespace = DEFAULT_NAMESPACE) -> PrefixMatch:
        return PrefixMatch(_NO_PAGES, None)

    def insert(
        self, token_ids: TokenIds, pages: PageIds, namespace: CacheNamespace = DEFAULT_NAMESPACE
    ) -> PrefixInsert:
        return PrefixInsert(_NO_PAGES, 0, None)

    def lock(self, handle: None) -> None:
        """Do nothing."""

    def unlock(self, handle: None) -> None:
        """Do nothing."""

    def evict(self, num_pages: int) -> PageIds:
        """Raise CacheFullError unless `num_pages` is 0."""
        if num_pages > 0:
            raise CacheFullError(f"cannot evict {num_pages} pages: the naive cache never holds any")
        return _NO_PAGES

    @property
    def num_evictable(self) -> int:
        return 0

    @property
    def num_locked(self) -> int:
        return 0

    def check(self) -> None:
        """Do nothing: there is no structure to verify."""
