"""Prefix cache over a radix tree of whole pages (RadixAttention, arXiv 2312.07104)."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain, takewhile

import numpy as np

from minisgl_backends.prefix_cache.radix_node import RadixNode, edge_key
from minisgl_core.contracts.prefix_cache import (
    DEFAULT_NAMESPACE,
    CachedRun,
    CacheNamespace,
    PageIds,
    PrefixCache,
    PrefixInsert,
    PrefixMatch,
    TokenIds,
)
from minisgl_core.errors import CacheFullError

_EMPTY = np.empty(0, np.int32)


class RadixPrefixCache(PrefixCache):
    """Shares every common prefix, and evicts exactly as many pages as asked for.

    `_lru` holds every unlocked node, least recently used first, and a node always before its parent: whatever uses a
    node moves the path to it to the end, deepest first. A lock covers the whole path to the root, so nothing below an
    unlocked node is locked. Hence the first node of `_lru` is a leaf, and eviction takes from there without a look at
    the tree.

    Costs: match and insert are one vectorised comparison a token and one dictionary look-up a node of the path; lock
    and unlock are O(nodes of the path); evict is O(1) a node evicted; sizes are kept, not computed.

    Each namespace has a tree of its own, while something is cached in it.

    A handle is the last node of its prefix; that of an empty match is a root. `_locked` holds the locked nodes, so that
    the ones to show first need not be looked for.
    """

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size)
        self._roots: dict[CacheNamespace, RadixNode] = {}
        self._lru: OrderedDict[RadixNode, None] = OrderedDict()
        self._locked: dict[RadixNode, None] = {}
        self._num_evictable = 0
        self._num_locked = 0

    def match(self, token_ids: TokenIds, namespace: CacheNamespace = DEFAULT_NAMESPACE) -> PrefixMatch:
        """The longest cached prefix; splits the node in which it ends, and makes the path the most recently used."""
        node = self._walk(token_ids, self._root(namespace))
        return PrefixMatch(_pages_to(node), node)

    def insert(
        self, token_ids: TokenIds, pages: PageIds, namespace: CacheNamespace = DEFAULT_NAMESPACE
    ) -> PrefixInsert:
        """Adds what is missing as one node; token ids and page ids are copied."""
        num_pages = len(token_ids) // self.page_size
        assert len(pages) >= num_pages, f"{num_pages} whole pages of tokens, but {len(pages)} pages"
        node = self._walk(token_ids, self._root(namespace))
        present = _pages_to(node)
        if len(present) == num_pages:
            return PrefixInsert(present, num_pages, node)
        tokens = slice(len(present) * self.page_size, num_pages * self.page_size)
        new_tokens = np.array(token_ids[tokens], np.int32)
        new_pages = np.array(pages[len(present) : num_pages], np.int32)
        if node.namespace is not None:
            self._roots[node.namespace] = node
        leaf = RadixNode(new_tokens, new_pages, node)
        node.children[edge_key(new_tokens, self.page_size)] = leaf
        self._num_evictable += len(new_pages)
        self._touch(leaf)
        return PrefixInsert(np.concatenate((present, new_pages)), len(present), leaf)

    def lock(self, handle: RadixNode) -> None:
        """Counts one lock more on every node of the path."""
        for node in self._path_up(handle):
            if node.num_locks == 0:
                del self._lru[node]
                self._locked[node] = None
                self._num_evictable -= len(node.pages)
                self._num_locked += len(node.pages)
            node.num_locks += 1

    def unlock(self, handle: RadixNode) -> None:
        """Counts one lock less on every node of the path; what becomes unlocked is the most recently used."""
        for node in self._path_up(handle):
            assert node.num_locks > 0, "unlock without a lock"
            node.num_locks -= 1
            if node.num_locks == 0:
                self._lru[node] = None
                del self._locked[node]
                self._num_evictable += len(node.pages)
                self._num_locked -= len(node.pages)

    def evict(self, num_pages: int) -> PageIds:
        """Gives up the ends of the least recently used prefixes: exactly `num_pages` pages."""
        if num_pages > self._num_evictable:
            raise CacheFullError(
                f"cannot evict {num_pages} pages: {self._num_evictable} can be evicted, {self._num_locked} are locked"
            )
        evicted: list[PageIds] = []
        num_left = num_pages
        while num_left > 0:
            leaf, _ = self._lru.popitem(last=False)
            num_kept = max(0, len(leaf.pages) - num_left)
            if num_kept > 0:
                rest = leaf.split(num_kept, self.page_size)
                self._lru[rest] = None
                self._lru.move_to_end(rest, last=False)
            assert leaf.parent is not None
            assert not leaf.children
            del leaf.parent.children[edge_key(leaf.token_ids, self.page_size)]
            if leaf.parent.namespace is not None and not leaf.parent.children:
                del self._roots[leaf.parent.namespace]
            leaf.parent = None
            evicted.append(leaf.pages)
            num_left -= len(leaf.pages)
        self._num_evictable -= num_pages
        return np.concatenate(evicted) if evicted else np.empty(0, np.int32)

    @property
    def num_evictable(self) -> int:
        """Pages of unlocked nodes."""
        return self._num_evictable

    @property
    def num_locked(self) -> int:
        """Pages of locked nodes."""
        return self._num_locked

    def count_hit(self, handle: RadixNode) -> None:
        """Counts it on every node of the path."""
        now_s = time.monotonic()
        for node in self._path_up(handle):
            node.num_hits += 1
            node.last_hit_s = now_s

    def runs(self, max_runs: int) -> list[CachedRun]:
        """The nodes, without the roots."""
        chosen: dict[RadixNode, None] = {}
        for node in chain(reversed(self._locked), reversed(self._lru)):
            if len(chosen) == max_runs:
                break
            path = list(takewhile(lambda part: part not in chosen, self._path_up(node)))
            chosen.update(dict.fromkeys(path[::-1][: max_runs - len(chosen)]))
        return [node.shown() for node in chosen]

    def reset(self) -> Sequence[int]:
        """Starts again with an empty tree."""
        assert self._num_locked == 0, f"reset while {self._num_locked} pages are locked"
        pages = [page for node in self._lru for page in node.pages.tolist()]
        for node in self._lru:
            node.parent = None
        self._roots.clear()
        self._lru.clear()
        self._num_evictable = 0
        return pages

    def check(self) -> None:
        """Verifies the tree, the lock counts, the sizes and the order of eviction."""
        nodes = [node for root in self._roots.values() for node in _below(root)]
        place = {node: i for i, node in enumerate(self._lru)}
        for node in nodes:
            assert len(node.pages) > 0, "a node without pages"
            assert len(node.token_ids) == len(node.pages) * self.page_size, "a node whose tokens are not its pages"
            assert node.num_locks >= sum(child.num_locks for child in node.children.values()), (
                "a lock that skips an ancestor"
            )
            assert (node in place) == (node.num_locks == 0), "the eviction order and the locks disagree"
            assert (node in self._locked) == (node.num_locks > 0), "the locked nodes and the locks disagree"
            if node in place and node.parent in place:
                assert place[node] < place[node.parent], "a node was used more recently than its parent"
        for namespace, root in self._roots.items():
            assert root.namespace == namespace, "a tree under another's namespace"
            assert root.children, "a namespace in which nothing is cached"
        for node in (*self._roots.values(), *nodes):
            for key, child in node.children.items():
                assert child.parent is node, "a child with another parent"
                assert key == edge_key(child.token_ids, self.page_size), "a child under a key other than its first page"
        pages = [page for node in nodes for page in node.pages.tolist()]
        assert len(set(pages)) == len(pages), "a page appears twice"
        assert self._lru.keys() | self._locked.keys() <= set(nodes), "a node outside the tree is kept"
        assert self._num_evictable == sum(len(node.pages) for node in place), "num_evictable is wrong"
        assert self._num_locked == len(pages) - self._num_evictable, "num_locked is wrong"

    def _root(self, namespace: CacheNamespace) -> RadixNode:
        """The root of a namespace; a new one, which `insert` keeps, where nothing is cached in it."""
        return self._roots.get(namespace) or RadixNode(_EMPTY, _EMPTY, None, namespace=namespace)

    def _walk(self, token_ids: TokenIds, node: RadixNode) -> RadixNode:
        """Go down from `node` as far as whole pages agree, split where that ends inside a node, and mark the path as used."""
        rest = np.asarray(token_ids, np.int32)
        rest = rest[: len(rest) // self.page_size * self.page_size]
        while child := node.children.get(edge_key(rest, self.page_size)):
            num_common_pages = child.num_common_tokens(rest) // self.page_size
            if num_common_pages < len(child.pages):
                node = child.split(num_common_pages, self.page_size)
                (self._locked if node.num_locks else self._lru)[node] = None
                break
            node = child
            rest = rest[len(child.token_ids) :]
        self._touch(node)
        return node

    def _touch(self, node: RadixNode) -> None:
        for ancestor in self._path_up(node):
            if ancestor.num_locks > 0:
                break
            self._lru[ancestor] = None
            self._lru.move_to_end(ancestor)

    def _path_up(self, node: RadixNode) -> Iterator[RadixNode]:
        """`node` and its ancestors, without their root."""
        while node.namespace is None:
            assert node.parent is not None, "the handle's prefix was evicted: lock a match before anything may evict"
            yield node
            node = node.parent


def _pages_to(node: RadixNode) -> PageIds:
    """Pages of the prefix that ends with `node`."""
    runs = [node.pages]
    while node.parent is not None:
        node = node.parent
        runs.append(node.pages)
    return np.concatenate(runs[::-1])


def _below(node: RadixNode) -> Iterator[RadixNode]:
    """Every node under `node`; without recursion, since a path may be long."""
    stack = list(node.children.values())
    while stack:
        found = stack.pop()
        yield found
        stack.extend(found.children.values())
