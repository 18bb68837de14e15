"""Packed weights of GGUF files on GPUs. Weights have the values that gguf dequantizes to, rounded to the model's dtype."""

from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import cast

import torch

from minisgl_backends.kernels.activation import silu_and_mul
from minisgl_backends.kernels.packed_gemm import PackedGemm
from minisgl_backends.kernels.packed_matrix import TILE, PackedMatrix
from minisgl_backends.kernels.split_k import SplitKWorkspace
from minisgl_backends.moe.packed_grouped import packed_grouped_gemm
from minisgl_backends.moe.sorted_blocks import sort_into_blocks
from minisgl_backends.moe.tiles import choose_block_size
from minisgl_backends.moe.triton_grouped import sum_experts
from minisgl_backends.moe.triton_kernel import TritonMoe
from minisgl_backends.quantization.gguf_experts import GgufExperts
from minisgl_backends.quantization.gguf_method import GgufLinearMethod
from minisgl_backends.quantization.gguf_packing import pack
from minisgl_backends.quantization.gguf_types import GgmlType
from minisgl_core.contracts.layer_methods import EmbeddingOp, ExpertsOp, LinearSpec


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


class GpuExperts(GgufExperts):
    """Experts for the Triton kernels: the grouped GEMMs of `TritonMoe`, with packed weights."""

    replaced_kernel = TritonMoe

    def prepare(self) -> ExpertsOp:
        """Repack the blocks to matrices of all experts. Gate and up projections of one type become one GEMM."""
        gate_up, [down] = self._packed(self.gate_up), self._packed(self.down)
        num_experts, inner = self.spec.moe.num_experts, self.spec.moe.intermediate_size

        def run(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
            num_rows, top_k = topk_ids.numel(), topk_ids.shape[1]
            block_size = choose_block_size(num_rows, num_experts)
            blocks = sort_into_blocks(topk_ids.contiguous(), num_experts, block_size)
            x, out, intermediate = x.contiguous(), torch.empty_like(x), x.new_empty(num_rows, len(gate_up) * inner)
            for matrix, columns in zip(gate_up, torch.split(intermediate, inner, 1), strict=True):
                packed_grouped_gemm(x, matrix, columns, blocks, top_k=top_k)
            if len(gate_up) > 1:
                intermediate = silu_and_mul(intermediate)
            rows = x.new_empty(num_rows, x.shape[1])
            packed_grouped_gemm(intermediate, down, rows, blocks, row_weights=topk_weights.contiguous())
            sum_experts(rows, out)
            return out

        return run

    def _packed(self, experts: list[GgufLinearMethod]) -> list[PackedMatrix]:
        """Return the matrices of a projection of all experts, or of gate and up, and free the blocks."""
        spec, types = experts[0].spec, experts[0].types
        rows = -(-spec.parts[0].rows.size // TILE) * TILE
        is_fused = spec.gated and types[0] == types[1]
        groups, matrices = [[0, 1]] if is_fused else [[index] for index in range(len(types))], []
        for indices in groups:
            kind, size = types[indices[0]], len(experts) * len(indices) * rows
            matrix = PackedMatrix.empty(kind.packing, size, spec.in_features, spec.device, gated=is_fused)
            projections = [(expert.blocks, index) for expert in experts for index in indices]
            for position, (blocks, index) in enumerate(projections):
                pack(matrix, position * rows, kind, blocks[index])
                blocks[index] = torch.empty(0)
            matrices.append(matrix)
        return matrices
