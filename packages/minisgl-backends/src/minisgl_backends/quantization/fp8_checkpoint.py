"""Weights of FP8 checkpoints, loaded from the checkpoint's quantized values and scales. int8 checkpoints share the base classes.

The kernels take one scale per row (output channel). Per-channel scales are used as they are. A per-tensor scale is copied to all
rows of its tensor, so that the parts of a fused weight keep their own scales. Both represent the checkpoint's weights exactly.

Block scales (128 by 128 in DeepSeek's and Qwen's checkpoints) are converted. Each row takes the largest scale of its blocks, and
the values of its other blocks are rescaled and rounded again. The error of a weight is then at most 2^-4 of the weight or 2^-10
of its row's scale, whichever is larger. There is no error in the block with the largest scale, nor if all scales are powers of
two and the values stay normal numbers. The conversion runs in place, in chunks of 2 MB, so the weight is never dequantized as a
whole.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from minisgl_core.contracts.layer import Targets
from minisgl_core.contracts.layer_methods import (
    ExpertsMethod,
    ExpertsOp,
    ExpertsSpec,
    LinearMethod,
    LinearPart,
    LinearSpec,
)
from minisgl_core.contracts.moe import MoeKernel
from minisgl_core.contracts.ops import LinearOp, Ops
from minisgl_core.contracts.shard import Shard, sharded_target
from minisgl_core.utils.fp8 import FP8, LEAST_SCALE

Block = tuple[int, int]
"""Numbers of rows and columns that share a scale."""
_CHUNK = 2**18
"""Elements that are converted at once, which take about 2 MB of temporary memory."""


class CheckpointMatrix:
    """Quantized values and scales of one weight on this rank.

    Attributes:
        values: float8_e4m3fn, or int8 for `CheckpointInt8Linear`, [out, in]; padding rows and columns are zero.
        scales: one per row, float32 [out].
    """

    def __init__(
        self,
        values: torch.Tensor,
        scales: torch.Tensor,
        parts: Sequence[LinearPart],
        columns: Shard,
        block: Block | None,
    ) -> None:
        """Set up the load targets.

        Args:
            values: tensor of zeros, filled by loading.
            scales: tensor of zeros, filled by loading or by `convert`.
            parts: parts of a fused weight, in the order of its rows.
            columns: this rank's shard of the columns.
            block: rows and columns per block scale; None for a scale per tensor or per row.
        """
        self.values, self.scales = values, scales
        self._columns, self._block, self._parts = columns, block, []
        row = 0
        for part in parts:
            self._parts.append((part, slice(row, row + part.rows.unpadded_size)))
            row += part.rows.size
        self._block_scales = []
        if block is not None:
            self._block_scales = [scales.new_empty([x.size for x in self._block_shards(part, block)]) for part in parts]

    def _block_shards(self, part: LinearPart, block: Block) -> tuple[Shard, Shard]:
        return part.rows.in_blocks(block[0]), self._columns.in_blocks(block[1])

    def targets(self) -> Targets:
        """Yield ``NAME.weight`` and ``NAME.weight_scale`` of every part; core renames ``weight_scale_inv`` to the latter."""
        for index, (part, rows) in enumerate(self._parts):
            held = slice(rows.start, rows.start + part.rows.size)
            yield f"{part.name}.weight", sharded_target(self.values[held], part.rows, self._columns)
            if self._block is None:
                target = sharded_target(self.scales[held, None], part.rows)
            else:
                target = sharded_target(self._block_scales[index], *self._block_shards(part, self._block))
            yield f"{part.name}.weight_scale", replace(target, broadcast=True)

    def convert(self) -> None:
        """Convert block scales to one scale per row, in place."""
        if self._block is None or not self._columns.unpadded_size:
            return
        height, width = self._block
        column_blocks = _block_indices(self._columns, width, self.values.device)
        num_rows = max(1, _CHUNK // len(column_blocks))
        for (part, rows), block_scales in zip(self._parts, self._block_scales, strict=True):
            row_blocks = _block_indices(part.rows, height, self.values.device)
            largest = block_scales.amax(1, keepdim=True).clamp_min(LEAST_SCALE)
            self.scales[rows] = largest[row_blocks, 0]
            factors = block_scales / largest
            for start in range(0, part.rows.unpadded_size, num_rows):
                values = self.values[rows][start : start + num_rows, : len(column_blocks)]
                wide = factors[row_blocks[start : start + num_rows]].index_select(1, column_blocks)
                values.copy_(wide.mul_(values.float()))  # factors are at most 1, so nothing saturates
        self._block_scales = []


def _block_indices(shard: Shard, size: int, device: torch.device) -> torch.Tensor:
    """Return the block of each row or column, counted from the first block of this rank."""
    return torch.arange(shard.start, shard.stop, device=device) // size - shard.start // size


class CheckpointLinear(LinearMethod):
    """Base class of linear layers of a checkpoint with 8-bit weights.

    Attributes:
        weight_dtype: dtype of the weights.
    """

    weight_dtype: ClassVar[torch.dtype]

    def __init__(self, spec: LinearSpec, block: Block | None = None) -> None:
        super().__init__(spec)
        values = spec.empty(spec.out_features, spec.in_features, dtype=self.weight_dtype)
        scales = spec.empty(spec.out_features, dtype=torch.float32)
        self._matrix = CheckpointMatrix(values, scales, spec.parts, spec.columns, block)
        self._bias = spec.empty(spec.out_features) if spec.bias else None

    def targets(self) -> Targets:
        """Yield ``NAME.weight``, ``NAME.weight_scale`` and ``NAME.bias`` of every part."""
        yield from self._matrix.targets()
        if self._bias is not None:
            yield from self.spec.row_targets("bias", self._bias)


class CheckpointFp8Linear(CheckpointLinear):
    """A linear layer of an FP8 checkpoint."""

    weight_dtype = FP8

    def __init__(self, spec: LinearSpec, ops: Ops, block: Block | None) -> None:
        super().__init__(spec, block)
        self._ops = ops
        ops.linear.precompile(self._matrix.values, self._bias, gated=spec.gated)

    def prepare(self) -> LinearOp:
        """Convert block scales; see `LinearOps.prepare_fp8_linear` and `LinearOps.prepare_fp8_gated`."""
        self._matrix.convert()
        kernels = self._ops.linear
        make = kernels.prepare_fp8_gated if self.spec.gated else kernels.prepare_fp8_linear
        return make(self._matrix.values, self._matrix.scales, self._bias)


class CheckpointFp8Experts(ExpertsMethod):
    """The experts of a layer of an FP8 checkpoint."""

    weight_dtype: ClassVar[torch.dtype | None] = FP8

    def __init__(self, spec: ExpertsSpec, kernel: type[MoeKernel], block: Block | None) -> None:
        super().__init__(spec, kernel)
        moe = spec.moe
        rows = 2 * moe.intermediate_size
        self._gate_up = spec.empty(moe.num_experts, rows, moe.hidden_size, dtype=FP8)
        self._down = spec.empty(moe.num_experts, moe.hidden_size, moe.intermediate_size, dtype=FP8)
        self._gate_up_scales = spec.empty(moe.num_experts, rows, dtype=torch.float32)
        self._down_scales = spec.empty(moe.num_experts, moe.hidden_size, dtype=torch.float32)
        self._matrices = []
        for expert in range(moe.num_experts):
            gate_up, down = spec.gate_up_parts(expert), [spec.down_part(expert)]
            whole = Shard.whole(moe.hidden_size)
            self._matrices += [
                CheckpointMatrix(self._gate_up[expert], self._gate_up_scales[expert], gate_up, whole, block),
                CheckpointMatrix(self._down[expert], self._down_scales[expert], down, spec.inner, block),
            ]

    def targets(self) -> Targets:
        """Yield ``NAME.0.gate_proj.weight``, ``NAME.0.gate_proj.weight_scale`` and so on, and biases."""
        for matrix in self._matrices:
            yield from matrix.targets()
        yield from self.bias_targets()

    def prepare(self) -> ExpertsOp:
        """Convert block scales to scales per row."""
        for matrix in self._matrices:
            matrix.convert()
        return self.operation(self._gate_up, self._down, self._gate_up_scales, self._down_scales)
