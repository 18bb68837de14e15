"""Zeroed memory in huge pages, outside of the heap.

Decodes read all weights in each step. With pages of 4 KiB, misses of the TLB limit them (docs/quantization.md has measurements).
"""

import mmap
import threading
import weakref
from contextlib import suppress

import numpy as np
import torch

_HUGE = 2 << 20
_CHUNK = 64 << 20
"""Bytes of the mappings that small tensors share. Tensors of more than an eighth have mappings of their own."""
_ALIGNMENT = 64


class HugePages:
    """An allocator for tensors of one lifetime: small ones share mappings, which the system gets back with their last tensor."""

    def __init__(self) -> None:
        self._lock, self._used = threading.Lock(), 0
        self._chunk: weakref.ref[np.ndarray] | None = None

    def zeros(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 [num_bytes] on the CPU."""
        return torch.from_numpy(self._part_of_chunk(num_bytes) if num_bytes <= _CHUNK // 8 else _mapping(num_bytes))

    def _part_of_chunk(self, num_bytes: int) -> np.ndarray:
        with self._lock:
            chunk = None if self._chunk is None else self._chunk()
            if chunk is None or self._used + num_bytes > _CHUNK:
                chunk, self._used = _mapping(_CHUNK), 0
                self._chunk = weakref.ref(chunk)
            start, self._used = self._used, self._used + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return chunk[start : start + num_bytes]


def _mapping(num_bytes: int) -> np.ndarray:
    """Return a mapping in huge pages. Its end, which does not fill a huge page, is in small pages and so wastes no memory."""
    memory = mmap.mmap(-1, num_bytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -np.frombuffer(memory, np.uint8).ctypes.data % _HUGE
    with suppress(OSError):  # the kernel has no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE, start, num_bytes // _HUGE * _HUGE)
    return np.frombuffer(memory, np.uint8, num_bytes, start)
