"""Types of GGML's quantized blocks that the C kernels multiply by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from minisgl_core.contracts.shard import Shard


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A GGML type of quantized blocks.

    Attributes:
        number: GGML's number of the type.
        columns: columns per block.
        block_bytes: bytes per block.
        packed_bytes: bytes per block of 16 rows, packed; `unit_bytes` in packed.h.
    """

    number: int
    columns: int
    block_bytes: int
    packed_bytes: int

    def num_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a packed matrix, whose rows are padded to a multiple of 16."""
        return -(-rows // 16) * (columns // self.columns) * self.packed_bytes

    def in_bytes(self, columns: Shard) -> Shard | None:
        """Return this rank's bytes of a row of the file; None if the shard begins or ends within a block."""
        if any(each % self.columns for each in (columns.start, columns.stop, columns.size, columns.total)):
            return None
        ends = (columns.start, columns.stop, columns.size, columns.total)
        return Shard(*(each // self.columns * self.block_bytes for each in ends))


TYPES: Mapping[str, GgmlType] = {
    "Q4_0": GgmlType(2, 32, 18, 288),
    "Q4_1": GgmlType(3, 32, 20, 320),
    "Q5_0": GgmlType(6, 32, 22, 352),
    "Q5_1": GgmlType(7, 32, 24, 384),
    "Q8_0": GgmlType(8, 32, 34, 544),
    "Q2_K": GgmlType(10, 256, 84, 1344),
    "Q3_K": GgmlType(11, 256, 110, 1824),
    "Q4_K": GgmlType(12, 256, 144, 2368),
    "Q5_K": GgmlType(13, 256, 176, 2880),
    "Q6_K": GgmlType(14, 256, 210, 3360),
}
"""By the name in the checkpoint's ``quantization_config``. Weights of other types are dequantized while loading."""
