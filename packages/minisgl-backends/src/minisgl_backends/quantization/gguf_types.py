"""Types of GGML's quantized blocks that the C kernels multiply by, and the layouts that they repack them into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from minisgl_core.contracts.shard import Shard


@dataclass(frozen=True, slots=True)
class Layout:
    """Packed layout; see packed.h in `minisgl_backends.native`.

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
        number: GGML's number of the type.
        columns: columns per block.
        block_bytes: bytes per block.
        layout: packed layout that the blocks are repacked to.
    """

    number: int
    columns: int
    block_bytes: int
    layout: Layout

    def in_bytes(self, columns: Shard) -> Shard | None:
        """Return this rank's bytes of a row of the file; None if the shard begins or ends within a block."""
        if any(each % self.columns for each in (columns.start, columns.stop, columns.size, columns.total)):
            return None
        ends = (columns.start, columns.stop, columns.size, columns.total)
        return Shard(*(each // self.columns * self.block_bytes for each in ends))


_U4, _U4M, _U5, _U5M = Layout(0, 4, 1, False), Layout(1, 4, 1, True), Layout(2, 5, 1, False), Layout(3, 5, 1, True)
_S8, _U6, _U2M, _U3 = Layout(4, 8, 1, False), Layout(5, 6, 2, False), Layout(6, 2, 2, True), Layout(7, 3, 2, False)
TYPES: Mapping[str, GgmlType] = {
    "Q4_0": GgmlType(2, 32, 18, _U4),
    "Q4_1": GgmlType(3, 32, 20, _U4M),
    "Q5_0": GgmlType(6, 32, 22, _U5),
    "Q5_1": GgmlType(7, 32, 24, _U5M),
    "Q8_0": GgmlType(8, 32, 34, _S8),
    "Q2_K": GgmlType(10, 256, 84, _U2M),
    "Q3_K": GgmlType(11, 256, 110, _U3),
    "Q4_K": GgmlType(12, 256, 144, _U4M),
    "Q5_K": GgmlType(13, 256, 176, _U5M),
    "Q6_K": GgmlType(14, 256, 210, _U6),
}
"""By the name in the checkpoint's ``quantization_config``. Weights of other types are dequantized while loading."""
