"""Experts with 4-bit integers: of AWQ, GPTQ and compressed-tensors checkpoints, and of 16-bit ones."""

from dataclasses import replace
from typing import ClassVar

import torch

from minisgl_backends.kernels.int4_weight import quantize_groups
from minisgl_backends.moe.packed_weights import BLOCK, pack
from minisgl_backends.quantization.int4_checkpoint import CheckpointPart, Columns
from minisgl_backends.quantization.packed_experts import PackedExperts
from minisgl_core.contracts.checkpoint_quantization import Int4Format
from minisgl_core.contracts.layer import Targets
from minisgl_core.contracts.layer_methods import (
    ExpertsOp,
    ExpertsSpec,
    LinearPart,
    LinearSpec,
    PlainExperts,
)
from minisgl_core.contracts.moe import UINT4, MoeKernel
from minisgl_core.contracts.shard import Shard
from minisgl_core.errors import ModelFormatError


class _StackedWeight:
    """One weight of all experts; see `ExpertWeights`."""

    def __init__(self, spec: ExpertsSpec, rows: int, columns: int, block: int | None, has_zeros: bool) -> None:
        block = block or -(-columns // BLOCK) * BLOCK
        experts, groups, device = spec.moe.num_experts, -(-columns // block), spec.moe.device
        self.codes = torch.zeros(experts, rows, groups * block // 2, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(experts, rows, groups, dtype=spec.moe.dtype, device=device)
        self.zeros = torch.zeros(experts, rows, groups, dtype=torch.uint8, device=device) if has_zeros else None

    def of(self, expert: int) -> "_ExpertWeight":
        """Return an expert's matrix."""
        return _ExpertWeight(
            self.codes[expert], self.scales[expert].t(), None if self.zeros is None else self.zeros[expert].t()
        )


class _ExpertWeight:
    """One weight of an expert, as `CheckpointPart.store` takes it."""

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> None:
        self.codes, self.scales, self.zeros = codes, scales, zeros

    def rows_of(self, start: int, count: int) -> torch.Tensor:
        return torch.arange(start, start + count, device=self.codes.device)

    def store(self, rows: torch.Tensor, codes: torch.Tensor) -> None:
        self.codes[rows] = pack(codes, self.codes.shape[1])


class CheckpointInt4Experts(PackedExperts):
    """Packed tensors of each expert, which are repacked one expert at a time."""

    weight_dtype: ClassVar[torch.dtype | None] = UINT4

    def __init__(self, spec: ExpertsSpec, kernel: type[MoeKernel], checkpoint_format: Int4Format) -> None:
        super().__init__(spec, kernel)

        def part(linear_part: LinearPart, columns: Shard) -> CheckpointPart:
            layer = LinearSpec(linear_part.name, (linear_part,), columns, False, False, spec.moe.dtype, spec.moe.device)
            return CheckpointPart(linear_part, layer, checkpoint_format)

        hidden, experts = Shard.whole(spec.moe.hidden_size), range(spec.moe.num_experts)
        self._gate_up = [[part(each, hidden) for each in self.spec.gate_up_parts(expert)] for expert in experts]
        self._down = [[part(self.spec.down_part(expert), self.spec.inner)] for expert in experts]

    def targets(self) -> Targets:
        """Yield the names of the packed tensors and of the biases of every expert."""
        for parts in (*self._gate_up, *self._down):
            for each in parts:
                yield from each.targets()
        yield from self.bias_targets()

    def prepare(self) -> ExpertsOp:
        """Repack.

        Raises:
            ModelFormatError: the inputs of an expert are not in order.
        """
        gate_up, down = self._repacked(self._gate_up), self._repacked(self._down)
        self.zero_neighbor_rows(gate_up.scales, self.gate_up_bias)
        return self.operation(gate_up.codes, down.codes, gate_up.scales, down.scales, gate_up.zeros, down.zeros)

    def _repacked(self, experts: list[list[CheckpointPart]]) -> _StackedWeight:
        first = experts[0][0]
        count, columns = first.num_columns, _ordered_columns(first)
        rows = sum(part.rows.size for part in experts[0])
        has_zeros = any(part.has_zeros() for parts in experts for part in parts)
        found = _StackedWeight(self.spec, rows, count, columns.block, has_zeros)
        for expert, parts in enumerate(experts):
            row = 0
            for part in parts:
                part.store(found.of(expert), row, _ordered_columns(part) if part.has_index else columns)
                row += part.rows.size
            parts.clear()
        return found


def _ordered_columns(part: CheckpointPart) -> Columns:
    """Return the columns of a part whose inputs are in order.

    Raises:
        ModelFormatError: they are not.
    """
    columns, order = part.columns(), torch.arange(part.num_columns)
    if not torch.equal(columns.source[: len(order)], order):
        raise ModelFormatError(f"the inputs of {part.name} are not in order (act-order), which experts do not support")
    return replace(columns, source=order, padding=torch.zeros_like(order, dtype=torch.bool), is_plain=True)


class Int4Experts(PlainExperts):
    """Experts of a 16-bit checkpoint, quantized after loading."""

    weight_dtype: ClassVar[torch.dtype | None] = UINT4

    def prepare(self) -> ExpertsOp:
        """Quantize, one expert at a time."""
        gate_up = self._quantized(self.gate_up)
        del self.gate_up
        down = self._quantized(self.down)
        del self.down
        return self.operation(gate_up.codes, down.codes, gate_up.scales, down.scales)

    def _quantized(self, weights: torch.Tensor) -> _StackedWeight:
        _, rows, columns = weights.shape
        group = next((size for size in (128, 64) if columns % size == 0), BLOCK)
        found = _StackedWeight(self.spec, rows, columns, group, has_zeros=False)
        for expert, weight in enumerate(weights):
            padded = torch.nn.functional.pad(weight.float(), (0, -columns % group))
            codes, scales = quantize_groups(padded, group, weight.dtype)
            found.scales[expert] = scales
            found.codes[expert] = pack(codes, found.codes.shape[2])
        return found
