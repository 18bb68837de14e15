"""Packed weights of GGUF files on GPUs. Weights have the values that gguf dequantizes to, rounded to the model's dtype."""

from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import cast

import torch

from minisgl_backends.kernels.activation import silu_and_mul
from minisgl_backends.kernels.packed_gemm import PackedGemm
from minisgl_backends.kernels.packed_matrix import PackedMatrix
from minisgl_backends.kernels.split_k import SplitKWorkspace
from minisgl_backends.quantization.gguf_method import GgufLinearMethod
from minisgl_backends.quantization.gguf_packing import pack
from minisgl_backends.quantization.gguf_types import GgmlType
from minisgl_core.contracts.layer_methods import EmbeddingOp, LinearSpec


def gpu_method(device: torch.device) -> Callable[[LinearSpec, list[GgmlType]], GgufLinearMethod]:
    """Return the class of a model's layers, bound to the workspace that they share."""
    return partial(GpuLinearMethod, workspace=SplitKWorkspace(device))


class GpuLinearMethod(GgufLinearMethod):
    """Linear method that repacks the file's blocks for the Triton kernels."""

    def __init__(self, spec: LinearSpec, types: list[GgmlType], workspace: SplitKWorkspace) -> None:
        super().__init__(spec, types)
        self._workspace = workspace

    def prepare(self) -> EmbeddingOp:
        """Repack the blocks. Adjacent parts of one type become one GEMM."""
        spec = self.spec
        groups = [list(members) for _, members in groupby(range(len(self.types)), self.types.__getitem__)]
        is_fused = spec.gated and len(groups) == 1
        gemms, row = [], 0
        for indices in groups:
            rows = sum(spec.parts[index].rows.size for index in indices)
            matrix = self._packed(indices, rows, is_fused)
            bias = None if self.bias is None else self.bias[row : row + rows]
            gemms.append(PackedGemm(matrix, bias, self._workspace, spec.dtype))
            row += rows
        # An embedding has one part, and so one GEMM.
        return gemms[0] if len(gemms) == 1 else cast(EmbeddingOp, SplitLinear(gemms, spec.gated))

    def _packed(self, indices: list[int], rows: int, is_gated: bool) -> PackedMatrix:
        packing, row = self.types[indices[0]].packing, 0
        matrix = PackedMatrix.empty(packing, rows, self.spec.in_features, self.spec.device, gated=is_gated)
        for index in indices:
            pack(matrix, row, self.types[index], self.blocks[index])
            row += len(self.blocks[index])
            self.blocks[index] = torch.empty(0)
        return matrix


class SplitLinear:
    """Outputs of several GEMMs side by side, followed by ``silu_and_mul`` if the layer is gated."""

    def __init__(self, gemms: list[PackedGemm], gated: bool) -> None:
        self._gemms, self._gated = gemms, gated
        self._sizes = [gemm.num_outputs for gemm in gemms]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., N] from x [..., K]."""
        flat = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1]).contiguous()
        out = torch.empty(len(flat), sum(self._sizes), dtype=x.dtype, device=x.device)
        for gemm, columns in zip(self._gemms, torch.split(out, self._sizes, 1), strict=True):
            gemm.write(flat, columns)
        out = silu_and_mul(out) if self._gated else out
        return out.view(*x.shape[:-1], out.shape[-1])
