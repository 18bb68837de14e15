"""Table of the blocks that replicas hold, in constant memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from minisgl_core.contracts.router import BlockKeys

WAYS = 8
"""Entries per set. A block can be stored in any entry of one set, and replaces the least recently used one."""

Slots = npt.NDArray[np.int64]


class BlockTable:
    """Set-associative hash table from block keys to the replicas that hold the block.

    A block's key covers all tokens before it, so the keys of a prompt are a path in a radix tree without links. The table has
    NumPy arrays of fixed size: 12 bytes per entry, and one bit per entry and replica. If a
    block replaces another one, a later request may be routed to a replica that must compute more. Methods are vectorized over the
    blocks of a call.
    """

    def __init__(self, num_blocks: int, num_replicas: int) -> None:
        """Allocate twice `num_blocks` entries, so that few sets are ever full."""
        self._num_sets = max(1, -(-2 * num_blocks // WAYS))
        num_entries = WAYS * self._num_sets
        self._num_replicas = num_replicas
        self._keys = np.zeros(num_entries, np.uint64)
        self._keys_by_set = self._keys.reshape(-1, WAYS)
        self._last_used = np.zeros(num_entries, np.uint32)
        self._last_used_by_set = self._last_used.reshape(-1, WAYS)
        self._holders = np.zeros((num_entries, -(-num_replicas // 8)), np.uint8)
        self._now = 0

    @property
    def num_bytes(self) -> int:
        """Size of the table in bytes, which never changes."""
        return self._keys.nbytes + self._last_used.nbytes + self._holders.nbytes

    @property
    def capacity(self) -> int:
        """Number of entries."""
        return len(self._keys)

    def find(self, keys: BlockKeys) -> Slots:
        """Return the slot of each block; -1 if it is not stored."""
        sets = self._sets(keys)
        hits = self._keys_by_set[sets] == keys[:, None]
        ways = hits.argmax(axis=1)
        slots = sets * WAYS + ways
        return np.where(self._keys[slots] == keys, slots, -1)

    def num_held(self, slots: Slots) -> npt.NDArray[np.int64]:
        """Return how many blocks each replica holds of a prompt, counted up to the last one that it holds.

        Args:
            slots: result of `find` for the keys of the prompt.

        Returns:
            int64, shape [num_replicas]. Blocks before the last one count even if the table lacks them, because a cache
            evicts the last blocks of a prefix first.
        """
        indices = np.flatnonzero(slots >= 0)
        holders = self._holders[slots[indices]]
        # Few blocks of a path have other holders than the next block, and only these are unpacked.
        is_last = np.ones(len(indices), bool)
        (holders[1:] != holders[:-1]).any(axis=1, out=is_last[:-1])
        indices = indices[is_last]
        held = np.unpackbits(holders[is_last], axis=1, count=self._num_replicas, bitorder="little") * (
            indices[:, None] + 1
        )
        return held.max(axis=0, initial=0)  # type: ignore[no-any-return]

    def add(self, keys: BlockKeys, replica: int, slots: Slots | None = None) -> None:
        """Add a replica to the holders of these blocks, and mark the blocks as used. `slots`: result of `find`, if known."""
        self._now += 1
        slots = self.find(keys) if slots is None else slots
        present = slots[slots >= 0]
        self._last_used[present] = self._now
        self._holders[present, replica >> 3] |= np.uint8(1 << (replica & 7))
        missing = keys[slots < 0]
        while len(missing):
            sets = self._sets(missing)
            slots = sets * WAYS + self._last_used_by_set[sets].argmin(axis=1)
            self._keys[slots] = (
                missing  # of several keys for one slot, the last is stored; the next pass stores the others
            )
            self._last_used[slots] = self._now
            self._holders[slots] = 0
            self._holders[slots, replica >> 3] = np.uint8(1 << (replica & 7))
            missing = missing[self._keys[slots] != missing]
            if len(missing) and (self._last_used_by_set[self._sets(missing)] == self._now).all(axis=1).any():
                return  # one call fills a whole set, as a flood of insertions may; the rest is not stored

    def remove(self, keys: BlockKeys, replica: int) -> None:
        """Remove a replica from the holders of these blocks. Blocks without holders leave the table."""
        slots = self.find(keys)
        slots = slots[slots >= 0]
        self._holders[slots, replica >> 3] &= np.uint8(~(1 << (replica & 7)) & 0xFF)
        self._free(slots[~self._holders[slots].any(axis=1)])

    def remove_replica(self, replica: int) -> None:
        """Remove a replica from the holders of all blocks, in a pass over the whole table."""
        self._holders[:, replica >> 3] &= np.uint8(~(1 << (replica & 7)) & 0xFF)
        self._free(np.flatnonzero(~self._holders.any(axis=1)))

    def __len__(self) -> int:
        """Return the number of stored blocks, by a pass over the whole table."""
        return int(np.count_nonzero(self._keys))

    def _free(self, slots: Slots) -> None:
        self._keys[slots] = 0
        self._last_used[slots] = 0

    def _sets(self, keys: BlockKeys) -> Slots:
        """Return the set of each key: its upper half, scaled to the number of sets."""
        return ((keys >> np.uint64(32)) * np.uint64(self._num_sets) >> np.uint64(32)).view(np.int64)
