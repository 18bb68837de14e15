"""Types of GGML's quantized blocks that kernels multiply by, and the layouts that they are repacked into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from minisgl_backends.kernels.packed_matrix import Packing
from minisgl_core.contracts.shard import Shard


@dataclass(frozen=True, slots=True)
class Layout:
    """Packed layout of the C kernels; see packed.h in `minisgl_backends.native`.

    Attributes:
        index: place in LAYOUTS of packed.h.
        bits: bits per code.
        groups: scales per 32 columns.
        has_min: True if each scale has a minimum.
    """

    index: int
    bits: int
    groups: int
    has_min: bool

    def num_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a packed matrix, whose rows are padded to a multiple of 16."""
        return -(-rows // 16) * (columns // 32) * (64 * self.bits + 32 * self.groups * (1 + self.has_min))


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A GGML type of quantized blocks.

    Attributes:
        name: GGML's name of the type.
        number: GGML's number of the type.
        columns: columns per block.
        block_bytes: bytes per block.
        layout: packed layout that the blocks are repacked to for CPUs.
        packing: the same for GPUs.
    """

    name: str
    number: int
    columns: int
    block_bytes: int
    layout: Layout
    packing: Packing

    def in_bytes(self, columns: Shard) -> Shard | None:
        """Return this rank's bytes of a row of the file; None if the shard begins or ends within a block."""
        if any(each % self.columns for each in (columns.start, columns.stop, columns.size, columns.total)):
            return None
        ends = (columns.start, columns.stop, columns.size, columns.total)
        return Shard(*(each // self.columns * self.block_bytes for each in ends))


_U4, _U4M, _U5, _U5M = Layout(0, 4, 1, False), Layout(1, 4, 1, True), Layout(2, 5, 1, False), Layout(3, 5, 1, True)
_S8, _U6, _U2M, _U3 = Layout(4, 8, 1, False), Layout(5, 6, 2, False), Layout(6, 2, 2, True), Layout(7, 3, 2, False)
TYPES: Mapping[str, GgmlType] = {
    each.name: each
    for each in (
        GgmlType("Q4_0", 2, 32, 18, _U4, Packing("scale", 4, 0, sub=32, block=32, zero=8)),
        GgmlType("Q4_1", 3, 32, 20, _U4M, Packing("pair", 4, 0, sub=32, block=32)),
        GgmlType("Q5_0", 6, 32, 22, _U5, Packing("scale", 4, 1, sub=16, block=32, zero=16)),
        GgmlType("Q5_1", 7, 32, 24, _U5M, Packing("pair", 4, 1, sub=16, block=32)),
        GgmlType("Q8_0", 8, 32, 34, _S8, Packing("scale", 8, 0, sub=32, block=32, zero=128)),
        GgmlType("Q2_K", 10, 256, 84, _U2M, Packing("nibbles", 2, 0, sub=16, block=16)),
        GgmlType("Q3_K", 11, 256, 110, _U3, Packing("bytes", 2, 1, sub=16, block=16, zero=4)),
        GgmlType("Q4_K", 12, 256, 144, _U4M, Packing("byte_pairs", 4, 0, sub=32, block=32)),
        GgmlType("Q5_K", 13, 256, 176, _U5M, Packing("byte_pairs", 4, 1, sub=16, block=32)),
        GgmlType("Q6_K", 14, 256, 210, _U6, Packing("bytes", 4, 2, sub=16, block=16, zero=32)),
    )
}
"""By the name in the checkpoint's ``quantization_config``. Weights of other types are dequantized while loading."""
