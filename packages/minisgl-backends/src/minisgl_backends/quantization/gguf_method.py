"""Loading of a GGUF layer's blocks, which CPUs and GPUs repack for kernels of their own."""

import torch

from minisgl_backends.quantization.gguf_types import GgmlType
from minisgl_core.contracts.layer import Targets
from minisgl_core.contracts.layer_methods import EmbeddingMethod, LinearSpec
from minisgl_core.contracts.shard import sharded_target


class GgufLinearMethod(EmbeddingMethod):
    """Linear method that loads the file's blocks. Subclasses repack them in `prepare`.

    Attributes:
        types: type of each part.
        blocks: the file's bytes of each part on this rank, int8 [rows, bytes per row]; padding is zero.
        bias: [out_features], or None.
    """

    def __init__(self, spec: LinearSpec, types: list[GgmlType]) -> None:
        super().__init__(spec)
        self.types, self.blocks = types, []
        for part, kind in zip(spec.parts, types, strict=True):
            row_bytes = spec.in_features // kind.columns * kind.block_bytes
            self.blocks.append(self.allocate_blocks(part.rows.size, row_bytes))
        self.bias = spec.empty(spec.out_features) if spec.bias else None

    def targets(self) -> Targets:
        """Yield ``NAME.qweight`` and ``NAME.bias`` of every part."""
        for part, kind, blocks in zip(self.spec.parts, self.types, self.blocks, strict=True):
            columns = kind.in_bytes(self.spec.columns)
            assert columns is not None
            yield f"{part.name}.qweight", sharded_target(blocks, part.rows, columns)
        if self.bias is not None:
            yield from self.spec.row_targets("bias", self.bias)

    def allocate_blocks(self, rows: int, row_bytes: int) -> torch.Tensor:
        """Allocate the blocks of a part, int8 [rows, row_bytes], with zeros where loading leaves padding."""
        return self.spec.empty(rows, row_bytes, dtype=torch.int8)
