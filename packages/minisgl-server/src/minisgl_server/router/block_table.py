"""Table of the replicas that hold each block of a prompt, in constant memory.

This is not vLLM's block table: a block is one or more whole pages with at least 16 tokens; see
`minisgl_core.contracts.router.block_size_for`.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from minisgl_core.contracts.router import BlockKeys

WAY_BITS = 3
WAYS = 1 << WAY_BITS
"""Entries per set. A block can be stored in any entry of one set, and replaces the least recently used one."""

Slots = npt.NDArray[np.int64]
_HALF = np.uint64(32)
_MAX_TIME = int(np.iinfo(np.uint32).max)


class Lookup(NamedTuple):
    """Stored blocks of a prompt: their indices in the prompt, ascending, and their slots in the table."""

    indices: npt.NDArray[np.int64]
    slots: Slots


class BlockTable:
    """Set-associative hash table from block keys to the replicas that hold the block.

    A block's key covers all tokens before it, so the keys of a prompt are a path in a radix tree without links. The table has
    NumPy arrays of fixed size: 12 bytes per entry, and one bit per entry and replica, in words of 8 to 64 bits. If a
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
        self._word_bits = next((bits for bits in (8, 16, 32) if num_replicas <= bits), 64)
        self._num_words = -(-num_replicas // self._word_bits)
        self._holders = np.zeros(num_entries * self._num_words, f"<u{self._word_bits // 8}")
        self._holders_by_entry = self._holders.reshape(-1, self._num_words)
        self._now = 0

    @property
    def num_bytes(self) -> int:
        """Size of the table in bytes, which never changes."""
        return self._keys.nbytes + self._last_used.nbytes + self._holders.nbytes

    @property
    def capacity(self) -> int:
        """Number of entries."""
        return len(self._keys)

    def find(self, keys: BlockKeys) -> Lookup:
        """Return the blocks that are stored."""
        sets = self._sets(keys)
        hits = np.flatnonzero(self._keys_by_set.take(sets, axis=0) == keys[:, None])  # a key is in one entry at most
        indices = hits >> WAY_BITS
        return Lookup(indices, (sets[indices] << WAY_BITS) | (hits & (WAYS - 1)))

    def num_held(self, stored: Lookup) -> npt.NDArray[np.int64]:
        """Return how many blocks each replica holds of a prompt, counted up to the last one that it holds: int64 [num_replicas].

        `stored` is the result of `find`. Blocks before the last one count even if the table lacks them, because a cache evicts
        the last blocks of a prefix first.
        """
        indices, slots = stored
        holders = self._holders_by_entry.take(slots, axis=0)
        # Few blocks of a path have other holders than the next block, and only these are unpacked.
        is_last = np.ones(len(indices), bool)
        (holders[1:] != holders[:-1]).any(axis=1, out=is_last[:-1])
        bits = np.unpackbits(holders[is_last].view(np.uint8), axis=1, count=self._num_replicas, bitorder="little")
        return (bits * (indices[is_last, None] + 1)).max(axis=0, initial=0)  # type: ignore[no-any-return]

    def add(self, keys: BlockKeys, replica: int, stored: Lookup | None = None) -> None:
        """Add a replica to the holders of these blocks, and mark the blocks as used. `stored`: result of `find`, if known."""
        self._advance_clock()
        indices, present = stored or self.find(keys)
        self._last_used[present] = self._now
        word, bit = self._word_and_bit(replica)
        self._holders[present * self._num_words + word] |= bit
        missing = np.delete(keys, indices) if len(indices) < len(keys) else keys[:0]
        while len(missing):
            sets = self._sets(missing)
            slots = sets * WAYS + self._last_used_by_set[sets].argmin(axis=1)
            # Of several keys for one slot, the last is stored. The next pass stores the others.
            self._keys[slots] = missing
            self._last_used[slots] = self._now
            self._holders_by_entry[slots] = 0
            self._holders_by_entry[slots, word] = bit
            missing = missing[self._keys[slots] != missing]
            if len(missing) and (self._last_used_by_set[self._sets(missing)] == self._now).all(axis=1).any():
                return  # one call fills a whole set, as a flood of insertions may; the rest is not stored

    def remove(self, keys: BlockKeys, replica: int) -> None:
        """Remove a replica from the holders of these blocks. Blocks without holders leave the table."""
        _, slots = self.find(keys)
        word, bit = self._word_and_bit(replica)
        self._holders_by_entry[slots, word] &= ~bit
        self._free(slots[~self._holders_by_entry[slots].any(axis=1)])

    def remove_replica(self, replica: int) -> None:
        """Remove a replica from the holders of all blocks, in a pass over the whole table."""
        word, bit = self._word_and_bit(replica)
        self._holders_by_entry[:, word] &= ~bit
        self._free(np.flatnonzero(~self._holders_by_entry.any(axis=1)))

    def __len__(self) -> int:
        """Return the number of stored blocks, by a pass over the whole table."""
        return int(np.count_nonzero(self._keys))

    def _advance_clock(self) -> None:
        """Count a use. Before it exceeds 32 bits, half of the range is subtracted from all times, and those below become 0."""
        if self._now == _MAX_TIME:
            self._now -= _MAX_TIME // 2
            self._last_used -= np.minimum(self._last_used, _MAX_TIME // 2)
        self._now += 1

    def _free(self, slots: Slots) -> None:
        self._keys[slots] = 0
        self._last_used[slots] = 0

    def _word_and_bit(self, replica: int) -> tuple[int, Any]:
        """Return the index of a replica's word in an entry, and its bit in the word."""
        word, bit = divmod(replica, self._word_bits)
        return word, self._holders.dtype.type(1 << bit)

    def _sets(self, keys: BlockKeys) -> Slots:
        """Return the set of each key: its upper half, scaled to the number of sets."""
        return ((keys >> _HALF) * np.uint64(self._num_sets) >> _HALF).view(np.int64)
