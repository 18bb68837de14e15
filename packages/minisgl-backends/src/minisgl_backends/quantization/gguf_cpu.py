"""Packed weights of GGUF files on CPUs, for the C kernels.

These quantize activations to 8 bits with a scale per 32. (llama.cpp has one per 256 for K-quants.) Prefills and decodes use the
same arithmetic.
"""

from typing import NamedTuple

import torch

from minisgl_backends.native import library
from minisgl_backends.native.huge_pages import HugePages
from minisgl_backends.quantization.gguf_method import GgufLinearMethod
from minisgl_core.contracts.layer_methods import LinearSpec
from minisgl_core.contracts.ops.norm import silu_and_mul

_TILE = 16
"""Rows per tile; TILE in packed.h."""
_SCRATCH_FLOATS = 11
"""Size of 32 quantized activations in floats; XBlock in packed_gemm.c."""
_MAX_STACK_BLOCKS = 4096
"""Maximum number of 44-byte activation blocks that `packed_linear` keeps on a thread's stack."""
_BLOCKS, _PACKED = HugePages(), HugePages()


class CpuLinearMethod(GgufLinearMethod):
    """Linear method that repacks the file's blocks for the C kernels."""

    def allocate_blocks(self, rows: int, row_bytes: int) -> torch.Tensor:
        """Allocate in huge pages, which return to the system after repacking."""
        return _BLOCKS.zeros(rows * row_bytes).view(torch.int8).view(rows, row_bytes)

    def prepare(self) -> "CpuGgufLinear":
        """Repack the blocks. Adjacent parts of one type become one GEMM, unless rows of two parts would share a tile."""
        is_fused = self.spec.gated and len(set(self.types)) == 1
        groups = [[0]]
        for index in range(1, len(self.types)):
            ends_at_tile = self.spec.parts[index - 1].rows.size % _TILE == 0
            if is_fused or (ends_at_tile and self.types[index] == self.types[index - 1]):
                groups[-1].append(index)
            else:
                groups.append([index])
        kernels, matrices, row = library.load(self.spec.dtype), [], 0
        for indices in groups:
            rows = sum(self.spec.parts[index].rows.size for index in indices)
            matrices.append(_Matrix(self._repacked(kernels, indices), self.types[indices[0]].number, row, rows))
            row += rows
        return CpuGgufLinear(self.spec, kernels, matrices, self.bias, is_fused)

    def _repacked(self, kernels: library.Library, indices: list[int]) -> torch.Tensor:
        """Return the packed matrix of parts of one type, and free their blocks."""
        kind, columns = self.types[indices[0]], self.spec.in_features
        sizes = [kind.num_bytes(len(self.blocks[index]), columns) for index in indices]
        packed = _PACKED.zeros(sum(sizes))
        for index, part in zip(indices, torch.split(packed, sizes), strict=True):
            blocks = self.blocks[index]
            kernels.repack(part.data_ptr(), blocks.data_ptr(), kind.number, len(blocks), columns // 32)
            self.blocks[index] = torch.empty(0)
        return packed


class _Matrix(NamedTuple):
    """A packed matrix: `rows` rows of the layer's weight, from `first_row` on."""

    packed: torch.Tensor
    type: int
    first_row: int
    rows: int


class CpuGgufLinear:
    """``x @ weight.T + bias`` with packed matrices, followed by ``silu_and_mul`` if the layer is gated.

    Attributes:
        packed: memory of the matrices, uint8.
    """

    __slots__ = (
        "_bias", "_blocks", "_dtype", "_has_separate_silu", "_is_fused", "_kernels", "_linear", "_matrices", "_out",
        "_width", "packed",
    )  # fmt: skip

    def __init__(
        self,
        spec: LinearSpec,
        kernels: library.Library,
        matrices: list[_Matrix],
        bias: torch.Tensor | None,
        is_fused: bool,
    ) -> None:
        """`is_fused`: gate and up are in one matrix, and its kernel applies the activation."""
        self._kernels, self._linear = kernels, kernels.packed_linear
        self._is_fused, self._has_separate_silu, self._dtype = is_fused, spec.gated and not is_fused, spec.dtype
        self._width, self._blocks = spec.in_features, spec.in_features // 32
        self._out = spec.out_features // 2 if is_fused else spec.out_features
        # Addresses are looked up once, since a decode step makes more than a hundred calls.
        self._bias, self.packed = bias, [matrix.packed for matrix in matrices]
        self._matrices = [
            (
                matrix.first_row * spec.dtype.itemsize,
                matrix.packed.data_ptr(),
                matrix.type,
                matrix.rows // 2 if is_fused else matrix.rows,
                None if bias is None else bias[matrix.first_row :].data_ptr(),
            )
            for matrix in matrices
        ]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self._dtype or x.shape[-1] != self._width:
            raise TypeError(
                f"x has shape {list(x.shape)} and dtype {x.dtype}, but the weight needs [..., {self._width}] in {self._dtype}"
            )
        flat = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, self._width).contiguous()
        rows = len(flat)
        out = torch.empty(*x.shape[:-1], self._out, dtype=self._dtype)
        scratch = (
            torch.empty(rows * self._blocks * _SCRATCH_FLOATS) if rows > 1 or self._blocks > _MAX_STACK_BLOCKS else None
        )
        scratch_address = None if scratch is None else scratch.data_ptr()
        out_address, x_address, stride = out.data_ptr(), flat.data_ptr(), flat.stride(0)
        for offset, packed, kind, size, bias in self._matrices:
            self._linear(
                out_address + offset,
                self._out,
                x_address,
                stride,
                packed,
                bias,
                scratch_address,
                kind,
                rows,
                size,
                self._blocks,
                self._is_fused,
            )
        return silu_and_mul(out) if self._has_separate_silu else out

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """See `EmbeddingOp.rows`. An id that is no row of the weight gives NaN."""
        ids, (_, packed, kind, num_rows, _) = ids.to(torch.int64).contiguous(), self._matrices[0]
        out = torch.empty(len(ids), self._width, dtype=self._dtype)
        self._kernels.dequantize_rows(out.data_ptr(), packed, ids.data_ptr(), kind, len(ids), num_rows, self._blocks)
        return out
