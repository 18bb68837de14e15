"""No prefix cache: every prompt is computed from its first token."""

from __future__ import annotations

from collections.abc import Sequence

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
    """Matches nothing and takes nothing: all pages stay with their requests. Handles are None."""

    def match(self, token_ids: TokenIds, namespace: CacheNamespace = DEFAULT_NAMESPACE) -> PrefixMatch:
        """The empty match."""
        return PrefixMatch(_NO_PAGES, None)

    def insert(
        self, token_ids: TokenIds, pages: PageIds, namespace: CacheNamespace = DEFAULT_NAMESPACE
    ) -> PrefixInsert:
        """Takes no page: the caller keeps them all."""
        return PrefixInsert(_NO_PAGES, 0, None)

    def lock(self, handle: None) -> None:
        """Nothing to protect."""

    def unlock(self, handle: None) -> None:
        """Nothing was protected."""

    def evict(self, num_pages: int) -> PageIds:
        """Raises CacheFullError for anything but 0 pages."""
        if num_pages > 0:
            raise CacheFullError(f"cannot evict {num_pages} pages: the naive cache never holds any")
        return _NO_PAGES

    @property
    def num_evictable(self) -> int:
        """Always 0."""
        return 0

    @property
    def num_locked(self) -> int:
        """Always 0."""
        return 0

    def reset(self) -> Sequence[int]:
        """Nothing to forget."""
        return []

    def check(self) -> None:
        """There is no structure to verify."""
