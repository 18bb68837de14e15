"""Prefix cache over a radix tree of whole pages (RadixAttention, arXiv 2312.07104)."""

import time
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, takewhile

import numpy as np

from minisgl_backends.prefix_cache.radix_node import RadixNode, edge_key
from minisgl_core.contracts.prefix_cache import (
    DEFAULT_NAMESPACE,
    CacheNamespace,
    PageIds,
    PrefixCache,
    PrefixInsert,
    PrefixMatch,
    PrefixTreeNode,
    TokenIds,
)
from minisgl_core.errors import CacheFullError

_EMPTY = np.empty(0, np.int32)
_MAX_TOKENS_AS_BYTES = 1024
"""Nodes of up to this many tokens are first compared with a prompt as bytes. Arrays are compared for longer nodes, and to find
the first token that differs."""


class RadixPrefixCache(PrefixCache):
    """Radix tree that shares every common prefix, and evicts exactly the requested number of pages.

    `_lru` holds the unlocked nodes, least recently used first, and each node before its parent: each use of a node moves its
    path to the end, deepest node first. A lock covers the whole path to the root, so no node below an unlocked node is locked.
    Hence the first node of `_lru` is a leaf, and eviction takes nodes from there without a search in the tree.

    Costs: match and insert take one dictionary lookup and one vectorized comparison per node of the path, O(tokens) in all. lock
    and unlock are O(nodes of the path), evict is O(1) per evicted node. Sizes are counters.

    Each namespace has a tree of its own, which exists while it has cached pages.

    A handle is the last node of its prefix; the handle of an empty match is a root. `_locked` holds the locked nodes, since
    `nodes` lists them first.
    """

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size)
        self._roots: dict[CacheNamespace, RadixNode] = {}
        self._lru: OrderedDict[RadixNode, None] = OrderedDict()
        self._locked: dict[RadixNode, None] = {}
        self._num_evictable = 0
        self._num_locked = 0

    def match(self, token_ids: TokenIds, namespace: CacheNamespace = DEFAULT_NAMESPACE) -> PrefixMatch:
        """Return the longest cached prefix, and mark its path as most recently used; may split the node in which it ends."""
        node = self._walk(token_ids, self._root(namespace))
        return PrefixMatch(_pages_to(node), node)

    def insert(
        self, token_ids: TokenIds, pages: PageIds, namespace: CacheNamespace = DEFAULT_NAMESPACE
    ) -> PrefixInsert:
        """Insert the pages that are not cached yet as one node. Token ids and page ids are copied."""
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
        """Increment the lock count of every node of the path."""
        for node in self._path_up(handle):
            if node.num_locks == 0:
                del self._lru[node]
                self._locked[node] = None
                self._num_evictable -= len(node.pages)
                self._num_locked += len(node.pages)
            node.num_locks += 1

    def unlock(self, handle: RadixNode) -> None:
        """Decrement the lock count of every node of the path. Nodes that become unlocked are the most recently used."""
        for node in self._path_up(handle):
            assert node.num_locks > 0, "unlock without a lock"
            node.num_locks -= 1
            if node.num_locks == 0:
                self._lru[node] = None
                del self._locked[node]
                self._num_evictable += len(node.pages)
                self._num_locked -= len(node.pages)

    def evict(self, num_pages: int) -> PageIds:
        """Evict exactly `num_pages` pages, from the ends of the least recently used prefixes."""
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
                kept = leaf.split(num_kept, self.page_size)  # `leaf` now has only the pages to evict
                self._lru[kept] = None
                self._lru.move_to_end(kept, last=False)
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
        return self._num_evictable

    @property
    def num_locked(self) -> int:
        return self._num_locked

    def count_hit(self, handle: RadixNode) -> None:
        """Count the hit on every node of the path."""
        now_s = time.monotonic()
        for node in self._path_up(handle):
            node.num_hits += 1
            node.last_hit_s = now_s

    def nodes(self, max_nodes: int) -> list[PrefixTreeNode]:
        """Return the nodes without the roots: locked ones first, then the most recently used, each after its parent."""
        selected: dict[RadixNode, None] = {}
        for node in chain(reversed(self._locked), reversed(self._lru)):
            if len(selected) == max_nodes:
                break
            path = list(takewhile(lambda ancestor: ancestor not in selected, self._path_up(node)))
            selected.update(dict.fromkeys(path[::-1][: max_nodes - len(selected)]))
        return [node.describe() for node in selected]

    def check(self) -> None:
        """Verify the tree, the lock counts, the sizes and the order of eviction."""
        nodes = [node for root in self._roots.values() for node in _descendants(root)]
        lru_index = {node: i for i, node in enumerate(self._lru)}
        for node in nodes:
            assert len(node.pages) > 0, "a node without pages"
            assert len(node.token_ids) == len(node.pages) * self.page_size, "a node whose tokens are not its pages"
            assert node.num_locks >= sum(child.num_locks for child in node.children.values()), (
                "a lock that skips an ancestor"
            )
            assert (node in lru_index) == (node.num_locks == 0), "the eviction order and the locks disagree"
            assert (node in self._locked) == (node.num_locks > 0), "the locked nodes and the locks disagree"
            if node in lru_index and node.parent in lru_index:
                assert lru_index[node] < lru_index[node.parent], "a node was used more recently than its parent"
        for namespace, root in self._roots.items():
            assert root.namespace == namespace, "a tree is under another namespace"
            assert root.children, "a namespace without cached pages has a tree"
        for node in (*self._roots.values(), *nodes):
            for key, child in node.children.items():
                assert child.parent is node, "a child with another parent"
                assert key == edge_key(child.token_ids, self.page_size), "a child under a key other than its first page"
        pages = [page for node in nodes for page in node.pages.tolist()]
        assert len(set(pages)) == len(pages), "a page appears twice"
        assert self._lru.keys() | self._locked.keys() <= set(nodes), "a node outside the tree is referenced"
        assert self._num_evictable == sum(len(node.pages) for node in lru_index), "num_evictable is wrong"
        assert self._num_locked == len(pages) - self._num_evictable, "num_locked is wrong"

    def _root(self, namespace: CacheNamespace) -> RadixNode:
        """Return the root of a namespace, or a new root if nothing is cached in it; only `insert` stores a new root."""
        return self._roots.get(namespace) or RadixNode(_EMPTY, _EMPTY, None, namespace=namespace)

    def _walk(self, token_ids: TokenIds, node: RadixNode) -> RadixNode:
        """Descend from `node` while whole pages match, split the node in which the match ends, and mark the path as used."""
        tokens = np.asarray(token_ids, np.int32)
        tokens = tokens[: len(tokens) // self.page_size * self.page_size]
        # A path may have thousands of short nodes. Their bytes are compared in a fraction of the time that arrays take.
        data, start = tokens.tobytes(), 0
        while child := node.children.get(data[4 * start : 4 * (start + self.page_size)]):
            length = len(child.token_ids)
            if length > _MAX_TOKENS_AS_BYTES or not data.startswith(child.token_ids.tobytes(), 4 * start):
                num_common = child.num_common_tokens(tokens[start:])
                if num_common < length:
                    node = child.split(num_common // self.page_size, self.page_size)
                    (self._locked if node.num_locks else self._lru)[node] = None
                    break
            node = child
            start += length
        self._touch(node)
        return node

    def _touch(self, node: RadixNode) -> None:
        """Move a node and its ancestors to the end of `_lru`, unless they are locked. All ancestors of a locked node are."""
        lru = self._lru
        while node.parent is not None and node.num_locks == 0:
            lru[node] = None
            lru.move_to_end(node)
            node = node.parent

    def _path_up(self, node: RadixNode) -> Iterator[RadixNode]:
        """Yield `node` and its ancestors without the root."""
        while node.namespace is None:
            assert node.parent is not None, "the handle's prefix was evicted: lock a match before anything may evict"
            yield node
            node = node.parent


def _pages_to(node: RadixNode) -> PageIds:
    """Return the pages of the prefix that ends with `node`."""
    pages = [node.pages]
    while node.parent is not None:
        node = node.parent
        pages.append(node.pages)
    return np.concatenate(pages[::-1])


def _descendants(node: RadixNode) -> Iterator[RadixNode]:
    """Yield every node below `node`, without recursion, since a path may be long."""
    stack = list(node.children.values())
    while stack:
        child = stack.pop()
        yield child
        stack.extend(child.children.values())
