"""Types of GGML's quantized blocks that kernels multiply by, and the layouts that they are repacked into."""

from collections.abc import Mapping
from dataclasses import dataclass

from minisgl_backends.kernels.packed_matrix import Packing
from minisgl_core.contracts.shard import Shard


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A GGML type of quantized blocks.

    Attributes:
        name: GGML's name of the type.
        number: GGML's number of the type.
        columns: columns per block.
        block_bytes: bytes per block.
        packed_bytes: bytes per block of 16 rows, packed; `unit_bytes` in packed.h. K-quants take more than ``16 * block_bytes``
            where 6-bit scales are unpacked to bytes.
        packing: layout that the blocks are repacked to for GPUs.
    """

    name: str
    number: int
    columns: int
    block_bytes: int
    packed_bytes: int
    packing: Packing

    def num_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a packed matrix, whose rows are padded to a multiple of 16."""
        return -(-rows // 16) * (columns // self.columns) * self.packed_bytes

    def in_bytes(self, columns: Shard) -> Shard | None:
        """Return this rank's bytes of a row of the file; None if the shard begins or ends within a block."""
        ends = (columns.start, columns.stop, columns.size, columns.total)
        if any(each % self.columns for each in ends):
            return None
        return Shard(*(each // self.columns * self.block_bytes for each in ends))


TYPES: Mapping[str, GgmlType] = {
    each.name: each
    for each in (
        GgmlType("Q4_0", 2, 32, 18, 288, Packing("scale", 4, 0, sub=32, block=32, zero=8)),
        GgmlType("Q4_1", 3, 32, 20, 320, Packing("pair", 4, 0, sub=32, block=32)),
        GgmlType("Q5_0", 6, 32, 22, 352, Packing("scale", 4, 1, sub=16, block=32, zero=16)),
        GgmlType("Q5_1", 7, 32, 24, 384, Packing("pair", 4, 1, sub=16, block=32)),
        GgmlType("Q8_0", 8, 32, 34, 544, Packing("scale", 8, 0, sub=32, block=32, zero=128)),
        GgmlType("Q2_K", 10, 256, 84, 1344, Packing("nibbles", 2, 0, sub=16, block=16)),
        GgmlType("Q3_K", 11, 256, 110, 1824, Packing("bytes", 2, 1, sub=16, block=16, zero=4)),
        GgmlType("Q4_K", 12, 256, 144, 2368, Packing("byte_pairs", 4, 0, sub=32, block=32)),
        GgmlType("Q5_K", 13, 256, 176, 2880, Packing("byte_pairs", 4, 1, sub=16, block=32)),
        GgmlType("Q6_K", 14, 256, 210, 3360, Packing("bytes", 4, 2, sub=16, block=16, zero=32)),
    )
}
"""Types by their name in the checkpoint's ``quantization_config``. Weights of other types are dequantized while loading."""
