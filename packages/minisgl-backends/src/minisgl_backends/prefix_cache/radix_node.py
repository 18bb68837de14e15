"""Nodes of the radix tree."""

import time
from dataclasses import dataclass, field
from itertools import count

from minisgl_core.contracts.prefix_cache import DEFAULT_NAMESPACE, CacheNamespace, PageIds, PrefixTreeNode, TokenIds


@dataclass(slots=True, eq=False, repr=False)
class RadixNode:
    """Consecutive whole pages; the path from the root to a node spells a cached prefix.

    A node with several pages stands for a chain of one-page nodes without branches, and is split where a branch
    appears.

    Attributes:
        token_ids: tokens of these pages, int32 [num_pages * page_size]. Never changed in place.
        pages: page ids, int32 [num_pages].
        parent: the node before; None for a root and for a node that was evicted.
        namespace: namespace of a root, whose children begin its prompts; None for every other node.
        children: the nodes after this one, keyed by the bytes of their first page's tokens.
        num_locks: locks on this node and on all nodes below it; not counted on a root.
        node_id, num_hits, last_hit_s: see `PrefixTreeNode`.
    """

    token_ids: TokenIds
    pages: PageIds
    parent: "RadixNode | None"
    num_locks: int = 0
    namespace: CacheNamespace | None = None
    children: "dict[bytes, RadixNode]" = field(default_factory=dict)
    node_id: int = field(default_factory=count().__next__)
    num_hits: int = 0
    last_hit_s: float = field(default_factory=time.monotonic)

    def num_common_tokens(self, token_ids: TokenIds) -> int:
        """Return the length of the common prefix of this node's tokens and `token_ids`."""
        length = min(len(self.token_ids), len(token_ids))
        differs = self.token_ids[:length] != token_ids[:length]
        first = int(differs.argmax())
        return first if differs[first] else length

    def split(self, num_pages: int, page_size: int) -> "RadixNode":
        """Split this node after its first `num_pages` pages, and return the new node that holds these.

        This node keeps the rest, so that handles to it still stand for the same prefix.
        """
        assert self.parent is not None
        assert 0 < num_pages < len(self.pages)
        length = num_pages * page_size
        upper = RadixNode(self.token_ids[:length], self.pages[:num_pages], self.parent, self.num_locks)
        upper.num_hits, upper.last_hit_s = self.num_hits, self.last_hit_s
        self.parent.children[edge_key(upper.token_ids, page_size)] = upper
        self.token_ids, self.pages, self.parent = self.token_ids[length:], self.pages[num_pages:], upper
        upper.children[edge_key(self.token_ids, page_size)] = self
        return upper

    def describe(self) -> PrefixTreeNode:
        """Return the description of this node for monitoring."""
        assert self.parent is not None
        namespace = self.parent.namespace
        return PrefixTreeNode(
            node_id=self.node_id,
            parent_id=self.parent.node_id if namespace is None else 0,
            token_ids=self.token_ids,
            pages=self.pages,
            num_locks=self.num_locks,
            num_hits=self.num_hits,
            last_hit_s=self.last_hit_s,
            namespace=namespace or DEFAULT_NAMESPACE,
        )


def edge_key(token_ids: TokenIds, page_size: int) -> bytes:
    """Return the key in `children` of a node whose tokens start with `token_ids`."""
    return token_ids[:page_size].tobytes()
