"""Each class breaks one promise of the contract, which the kit must notice."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from kit_runner import failures, iter_failures

from minisgl_backends.prefix_cache.naive import NaivePrefixCache
from minisgl_backends.prefix_cache.radix import RadixPrefixCache
from minisgl_core.contracts.prefix_cache import (
    CacheNamespace,
    PageIds,
    PrefixCache,
    PrefixInsert,
    PrefixMatch,
    PrefixTreeNode,
    TokenIds,
)
from minisgl_core.testing.prefix_cache_kit import PrefixCacheTests


class ForgetsToLock(RadixPrefixCache):
    def lock(self, handle: Any) -> None:
        pass

    def unlock(self, handle: Any) -> None:
        pass


class LocksOnce(RadixPrefixCache):
    def lock(self, handle: Any) -> None:
        if handle.num_locks == 0:
            super().lock(handle)

    def unlock(self, handle: Any) -> None:
        if handle.num_locks > 0:
            super().unlock(handle)


class LocksTheLastRunOnly(RadixPrefixCache):
    def _path_up(self, node: Any) -> Any:
        return [node] if node.namespace is None else []


class EvictsLocked(RadixPrefixCache):
    def evict(self, num_pages: int) -> PageIds:
        if num_pages > self.num_evictable and self.num_locked:
            victim = next(iter(next(iter(self._roots.values())).children.values()))
            return victim.pages[:num_pages]
        return super().evict(num_pages)


class EvictsFewerThanRequested(RadixPrefixCache):
    def evict(self, num_pages: int) -> PageIds:
        return super().evict(min(num_pages, self.num_evictable))


class EvictsBeforeItRefuses(RadixPrefixCache):
    def evict(self, num_pages: int) -> PageIds:
        if num_pages > self.num_evictable:
            super().evict(min(1, self.num_evictable))
        return super().evict(num_pages)


class EvictsNewestFirst(RadixPrefixCache):
    def _touch(self, node: Any) -> None:
        super()._touch(node)
        path = [part for part in self._path_up(node) if part in self._lru]
        for part in reversed(path):
            self._lru.move_to_end(part, last=False)


class DoesNotTouchInsertedPages(RadixPrefixCache):
    def _touch(self, node: Any) -> None:
        if node not in self._lru:
            super()._touch(node)


class ReportsNothingPresent(RadixPrefixCache):
    def insert(self, token_ids: TokenIds, pages: PageIds, *namespace: CacheNamespace) -> PrefixInsert:
        return replace(super().insert(token_ids, pages, *namespace), num_present=0)


class ReturnsTheOfferedPages(RadixPrefixCache):
    def insert(self, token_ids: TokenIds, pages: PageIds, *namespace: CacheNamespace) -> PrefixInsert:
        result = super().insert(token_ids, pages, *namespace)
        return replace(result, pages=pages[: len(result.pages)])


class SizeDrifts(RadixPrefixCache):
    @property
    def num_evictable(self) -> int:
        return self._num_evictable + (self._num_locked > 3)


class MatchLocks(RadixPrefixCache):
    def match(self, token_ids: TokenIds, *namespace: CacheNamespace) -> PrefixMatch:
        result = super().match(token_ids, *namespace)
        self.lock(result.handle)
        return result


class MatchesWholeRunsOnly(RadixPrefixCache):
    def match(self, token_ids: TokenIds, *namespace: CacheNamespace) -> PrefixMatch:
        longest = super().match(token_ids, *namespace)
        return super().match(token_ids[: max(0, len(longest.pages) - 1) * self.page_size], *namespace)


class ComparesFirstTokensOfPages(RadixPrefixCache):
    """Compares pages by their first tokens, which may be equal in different pages."""

    def _walk(self, token_ids: TokenIds, node: Any) -> Any:
        firsts = np.repeat(np.asarray(token_ids)[:: self.page_size], self.page_size)
        return super()._walk(firsts[: len(token_ids)], node)


class KeepsTheCallersArray(RadixPrefixCache):
    def insert(self, token_ids: TokenIds, pages: PageIds, *namespace: CacheNamespace) -> PrefixInsert:
        result = super().insert(token_ids, pages, *namespace)
        if result.num_present == 0 and len(result.pages) > 0:
            result.handle.pages = pages[: len(result.pages)]
        return result


class HandsOutItsArray(RadixPrefixCache):
    def match(self, token_ids: TokenIds, *namespace: CacheNamespace) -> PrefixMatch:
        result = super().match(token_ids, *namespace)
        return (
            replace(result, pages=result.handle.pages)
            if result.handle.parent and result.handle.parent.parent is None
            else result
        )


class RefusesEmptyLocks(RadixPrefixCache):
    def lock(self, handle: Any) -> None:
        assert handle.namespace is None
        super().lock(handle)


class LeaksDuplicates(RadixPrefixCache):
    """Replaces a cached page by the caller's duplicate, so that neither side owns the cached page any more."""

    def insert(self, token_ids: TokenIds, pages: PageIds, *namespace: CacheNamespace) -> PrefixInsert:
        result = super().insert(token_ids, pages, *namespace)
        if result.num_present == len(result.pages) > 0:
            result.handle.pages = np.array(pages[len(result.pages) - len(result.handle.pages) : len(result.pages)])
        return result


class FindsItselfBroken(RadixPrefixCache):
    def check(self) -> None:
        raise AssertionError("broken")


class HidesLockedRuns(RadixPrefixCache):
    def nodes(self, max_nodes: int) -> list[PrefixTreeNode]:
        return [node for node in super().nodes(max_nodes) if not node.num_locks]


class ShowsNoParents(RadixPrefixCache):
    def nodes(self, max_nodes: int) -> list[PrefixTreeNode]:
        return [replace(node, parent_id=0) for node in super().nodes(max_nodes)]


class InsertsNothing(NaivePrefixCache):
    pass


BROKEN = [
    kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, PrefixCache) and kind.__module__ == __name__
]


class LooksAtChangedTokens(RadixPrefixCache):
    """Base class of caches that compare a function of the tokens instead of the tokens."""

    nodes = PrefixCache.nodes

    def seen(self, token_ids: TokenIds) -> TokenIds:
        raise NotImplementedError

    def match(self, token_ids: TokenIds, *namespace: CacheNamespace) -> PrefixMatch:
        return super().match(self.seen(token_ids), *namespace)

    def insert(self, token_ids: TokenIds, pages: PageIds, *namespace: CacheNamespace) -> PrefixInsert:
        return super().insert(self.seen(token_ids), pages, *namespace)


class ComparesLow16Bits(LooksAtChangedTokens):
    def seen(self, token_ids: TokenIds) -> TokenIds:
        return token_ids & 0xFFFF


class ComparesAsFloats(LooksAtChangedTokens):
    def seen(self, token_ids: TokenIds) -> TokenIds:
        return token_ids.astype(np.float32).astype(np.int64).astype(np.int32)


class ComparesChecksums(LooksAtChangedTokens):
    """Compares only the checksums of pages."""

    checksum = staticmethod(zlib.crc32)

    def seen(self, token_ids: TokenIds) -> TokenIds:
        pages = token_ids[: len(token_ids) // self.page_size * self.page_size].reshape(-1, self.page_size)
        sums = [self.checksum(page.tobytes()) for page in pages]
        return np.repeat(np.array(sums, np.uint32).view(np.int32), self.page_size)


class ComparesAdler(ComparesChecksums):
    checksum = staticmethod(zlib.adler32)


class ComparesHashes(ComparesChecksums):
    checksum = staticmethod(lambda page: hash(page) & 0xFFFFFFFF)


class SortsTokens(LooksAtChangedTokens):
    def seen(self, token_ids: TokenIds) -> TokenIds:
        pages = token_ids[: len(token_ids) // self.page_size * self.page_size].reshape(-1, self.page_size)
        return np.sort(pages, axis=1).reshape(-1)


class IgnoresNamespaces(RadixPrefixCache):
    def match(self, token_ids: TokenIds, *namespace: CacheNamespace) -> PrefixMatch:
        return super().match(token_ids)

    def insert(self, token_ids: TokenIds, pages: PageIds, *namespace: CacheNamespace) -> PrefixInsert:
        return super().insert(token_ids, pages)


class JoinsSaltAndAdapter(RadixPrefixCache):
    def _root(self, namespace: CacheNamespace) -> Any:
        return super()._root(CacheNamespace("".join(namespace)))


@pytest.mark.parametrize(
    ("broken", "caught_by"),
    [
        *((kind, "test_similar_pages") for kind in (ComparesLow16Bits, ComparesAsFloats, ComparesChecksums)),
        *((kind, "test_similar_pages") for kind in (ComparesAdler, ComparesHashes, SortsTokens)),
        *((kind, "test_namespaces") for kind in (IgnoresNamespaces, JoinsSaltAndAdapter)),
    ],
)
def test_comparisons_of_other_things_than_tokens_fail_the_kit(broken: type[PrefixCache], caught_by: str) -> None:
    class Kit(PrefixCacheTests):
        provider = broken

    assert next(iter_failures(Kit(), caught_by), None)


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_cache_fails_the_kit(broken: type[PrefixCache]) -> None:
    class Kit(PrefixCacheTests):
        profile = settings(
            PrefixCacheTests.profile,
            phases=[Phase.generate],
            report_multiple_bugs=False,
            database=None,
            derandomize=True,
        )

        provider = broken

    assert next(iter_failures(Kit(), "test_agrees_with_a_dictionary"), None)


def test_a_correct_cache_passes_with_the_runner() -> None:
    class Kit(PrefixCacheTests):
        profile = settings(PrefixCacheTests.profile, max_examples=10)
        provider = RadixPrefixCache

    assert failures(Kit()) == {}
