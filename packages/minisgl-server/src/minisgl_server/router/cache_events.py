"""Hooks that report the content of a replica's prefix cache to the router, registered as ``cache_events`` in ``minisgl.hooks``.

They are active if MINISGL_ROUTER_EVENTS is set, which ``minisgl launch`` does for a router that uses events. The changes of a
step are sent in one message. If the router does not keep up, messages are dropped.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import zmq

from minisgl_core import hookimpl
from minisgl_core.contracts.router import BlockKeys, block_keys, block_size_for
from minisgl_core.protocol.messages import CacheEvents, EngineInfo
from minisgl_core.runtime.ipc import Sender

if TYPE_CHECKING:
    from minisgl_core.contracts.prefix_cache import CacheNamespace, PageIds, TokenIds

ROUTER_EVENTS_VARIABLE = "MINISGL_ROUTER_EVENTS"
"""Environment variable with the router's address for events."""
MAX_UNSENT = 100
"""Length of the send queue, in messages."""


def make() -> CacheEventHooks | None:
    """Return the hooks of one engine, or None without a router."""
    address = os.environ.get(ROUTER_EVENTS_VARIABLE)
    return CacheEventHooks(address) if address else None


class CacheChanges:
    """Blocks that were inserted into and evicted from the prefix cache of one engine since the last call of `take`.

    A block is cached while its last page is, since a cache evicts the pages of a prefix from its end. `_page_keys` has the key of
    the block that ends with each page; 0 for other pages.
    """

    def __init__(self, info: EngineInfo) -> None:
        self._engine_id = info.engine_id
        self._block_size = block_size_for(info.page_size)
        self._pages_per_block = self._block_size // info.page_size
        self._page_keys: BlockKeys = np.zeros(info.num_pages, np.uint64)
        self._changes: dict[int, bool] = {}
        """By key: True if the block was inserted last, False if it was evicted."""

    @hookimpl
    def pages_cached(self, namespace: CacheNamespace, token_ids: TokenIds, pages: PageIds, num_present: int) -> None:
        """Note the new blocks."""
        keys = block_keys(token_ids, self._block_size, namespace)[num_present // self._pages_per_block :]
        last_pages = pages[self._pages_per_block - 1 :: self._pages_per_block]
        self._page_keys[last_pages[len(last_pages) - len(keys) :]] = keys
        self._changes.update(dict.fromkeys(keys.tolist(), True))

    @hookimpl
    def pages_evicted(self, pages: PageIds) -> None:
        """Note the evicted blocks, which are those that lose their last page."""
        keys = self._page_keys[pages]
        self._page_keys[pages] = 0
        self._changes.update(dict.fromkeys(keys[keys != 0].tolist(), False))

    def take(self) -> CacheEvents | None:
        """Return the changes; None if there are none."""
        if not self._changes:
            return None
        events = cache_events(self._engine_id, self._changes)
        self._changes.clear()
        return events


class CacheEventHooks(CacheChanges):
    """Hooks of one engine. The attributes of `CacheChanges` are set when the engine starts, as they depend on its page size."""

    def __init__(self, address: str) -> None:
        self._address = address

    @hookimpl
    def engine_started(self, info: EngineInfo) -> None:
        super().__init__(info)
        self._sender = Sender(self._address, max_messages=MAX_UNSENT)

    @hookimpl
    def batch_finished(self) -> None:
        """Send the changes of the step."""
        event = self.take()
        if event is not None:
            with suppress(zmq.Again):  # the router is far behind; it does not get these events
                self._sender.send(event, wait=False)

    @hookimpl
    def engine_stopped(self) -> None:
        self._sender.close()


def cache_events(engine_id: int, changes: Mapping[int, bool]) -> CacheEvents:
    """Return the message about `changes`: keys of blocks, with True for inserted and False for evicted ones."""
    keys, is_cached = np.array(list(changes), np.uint64), np.array(list(changes.values()), bool)
    return CacheEvents(engine_id, keys[is_cached], keys[~is_cached])
