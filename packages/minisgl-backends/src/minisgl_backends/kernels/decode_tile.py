"""Tile sizes of `kernels.paged_decode`."""

from dataclasses import dataclass

import torch

from minisgl_backends.kernels.device import has_large_shared_memory

_TILE_BYTES = 16384
"""Size of a tile's keys in the dtype of the dot product."""


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """Tile of decode attention, and the grid.

    Attributes:
        keys: keys per tile; at least 16, the smallest K of ``tl.dot`` (softmax weights @ V).
        num_warps: warps per program.
        num_stages: stages of the software pipeline: ``num_stages - 1`` tiles of K and V are in flight.
        programs_per_sm: programs per SM in the grid. If an SM holds fewer, by its registers or shared memory, the others run
            after them, at lower occupancy.
    """

    keys: int
    num_warps: int
    num_stages: int
    programs_per_sm: int

    def num_programs(self, device: torch.device) -> int:
        """Return the number of programs in the grid."""
        if device.type != "cuda":
            return 4  # under Triton's interpreter: enough for requests in several partitions
        return int(torch.cuda.get_device_properties(device).multi_processor_count) * self.programs_per_sm


def decode_tile(dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device) -> DecodeTile:
    """Return the tile for a head dimension and the dtypes of q and the KV pool.

    Up to 64 KB of K and V are in flight per program. An SM with 200 KB of shared memory holds three programs, and one with less
    holds one. With heads of 256, it holds two at most, because their queries and sums take many registers
    (docs/performance-notes.md). Heads between two powers of two have the tile of the larger one.
    """
    largest = _TILE_BYTES // (dim * dtype.itemsize)
    keys = min(max(1 << (largest.bit_length() - 1), 16), 128)  # a power of two, as sizes of Triton's tiles are
    num_stages = 1 + 2 * dtype.itemsize // kv_dtype.itemsize
    programs_per_sm = 1 if not has_large_shared_memory(device) else 2 if dim > 128 else 3
    return DecodeTile(keys, 4, num_stages, programs_per_sm)
