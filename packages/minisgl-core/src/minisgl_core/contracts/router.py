"""Contract of routers, which choose the replica that runs a request."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from minisgl_core.contracts.prefix_cache import DEFAULT_NAMESPACE, CacheNamespace, TokenIds

BlockKeys = npt.NDArray[np.uint64]
"""Keys of blocks of tokens, shape [num_blocks]; see `block_keys`."""
MIN_BLOCK_TOKENS = 16
"""Minimum number of tokens per block."""


def block_size_for(page_size: int) -> int:
    """Return the tokens per block: the smallest multiple of the page size that has `MIN_BLOCK_TOKENS`."""
    return -(-MIN_BLOCK_TOKENS // page_size) * page_size


def block_keys(token_ids: TokenIds, block_size: int, namespace: CacheNamespace = DEFAULT_NAMESPACE) -> BlockKeys:
    """Return a key for each whole block of a prompt. It identifies the block together with all tokens before it.

    Equal prefixes in equal namespaces have equal keys in every process; tokens past the last whole block are ignored. A key is
    never 0. It is the sum of token times a random number per position (multilinear hashing, Carter and Wegman 1979), modulo
    2^64. Different prefixes have equal keys with a probability below 2^-32, and then a request is routed to a replica that does
    not hold its prefix.
    """
    num_tokens = len(token_ids) // block_size * block_size
    terms = np.asarray(token_ids[:num_tokens]).astype(np.uint64)
    terms += np.uint64(1)
    terms *= _multipliers(1 << num_tokens.bit_length())[:num_tokens]
    keys: BlockKeys = terms.cumsum(dtype=np.uint64)[block_size - 1 :: block_size]
    if namespace != DEFAULT_NAMESPACE:
        text = f"{len(namespace.salt)} {namespace.salt}{namespace.adapter_id}"
        keys += np.uint64(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()))
    keys ^= keys >> np.uint64(32)  # the high bits of the sum are the most random ones
    return np.maximum(keys, np.uint64(1))


@cache
def _multipliers(num_tokens: int) -> BlockKeys:
    """Return a random odd number per position, the same in every process. A longer table begins with the shorter ones."""
    numbers = np.random.Generator(np.random.PCG64(0)).integers(1 << 63, size=num_tokens, dtype=np.uint64)
    return numbers * np.uint64(2) + np.uint64(1)


class ReplicaView(Protocol):
    """Properties of a replica that routers may read."""

    @property
    def replica(self) -> int:
        """Index of the replica, from 0."""

    @property
    def num_requests(self) -> int:
        """Requests that were routed to it and have not ended."""

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of these requests."""


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """Prompt of the request to route.

    Attributes:
        token_ids: int32, shape [num_tokens]; read-only.
        block_size: tokens per block.
        namespace: namespace of the prompt in the prefix caches.
        user: the client's id of its user; empty if it gave none.
    """

    token_ids: TokenIds
    block_size: int
    namespace: CacheNamespace = DEFAULT_NAMESPACE
    user: str = ""

    def block_keys(self) -> BlockKeys:
        """Compute and return the keys of the prompt's whole blocks."""
        return block_keys(self.token_ids, self.block_size, self.namespace)


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """Properties of the replicas, and options for routers.

    Attributes:
        num_replicas: number of replicas.
        num_blocks: blocks that the prefix caches of all replicas can hold together.
        overload_requests: absolute threshold. A router may treat a replica as overloaded if it has over `overload_requests`
            requests more than the least loaded one, and also exceeds `overload_ratio`.
        overload_ratio: relative threshold: over `overload_ratio` times the requests of the least loaded replica.
    """

    num_replicas: int
    num_blocks: int
    overload_requests: int = 16
    overload_ratio: float = 1.5


class Router(ABC):
    """Router of requests to replicas. All calls run on one thread.

    A router whose `uses_events` is True receives the insertions and evictions of the replicas' prefix caches as events. The
    events of a replica arrive in order, some steps late. Events may be lost, so a router must bound its memory and must not
    depend on them.
    """

    plugin_api: ClassVar[str] = ">=2,<3"
    uses_events: ClassVar[bool] = False
    """True if the replicas report insertions and evictions; False saves the replicas this work."""

    def __init__(self, spec: RouterSpec) -> None:
        self.spec = spec

    @abstractmethod
    def route(self, prompt: RoutedPrompt, replicas: Sequence[ReplicaView]) -> int:
        """Return the index of the replica that runs a request.

        Args:
            prompt: prompt of the request.
            replicas: replicas that are ready, at least one, ordered by index. The result is the index of one of them.
        """

    def inserted(self, replica: int, keys: BlockKeys) -> None:
        """Handle the event that a replica's prefix cache has inserted these blocks."""

    def evicted(self, replica: int, keys: BlockKeys) -> None:
        """Handle the event that a replica's prefix cache has evicted these blocks. Some may be unknown."""

    def lost(self, replica: int) -> None:
        """Handle the event that a replica has ended. When it is ready again, its prefix cache is empty."""

    def stats(self) -> dict[str, Any]:
        """Return numbers about the router for display, by name."""
        return {}
