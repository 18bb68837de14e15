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

    def take_rows(self, rows: torch.Tensor) -> None:
        """Replace the rows of each expert by those with these indices, int64 [E, R]."""
        self.codes, self.scales = _take_rows(self.codes, rows), _take_rows(self.scales, rows)
        self.zeros = None if self.zeros is None else _take_rows(self.zeros, rows)

    def store(self, expert: int, row: int, part: CheckpointPart, columns: Columns) -> None:
        """Store a module as the rows of an expert from `row` on."""
        rows, blocks = slice(row, row + part.rows.unpadded_size), slice(len(columns.groups))
        self.scales[expert, rows, blocks] = part.scales(columns).t()
        if self.zeros is not None:
            self.zeros[expert, rows, blocks] = part.zeros(columns).t()
        for chunk, codes in part.codes(columns):
            self.codes[expert, rows][chunk] = pack(codes, self.codes.shape[2])


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
        """Repack. With act-order, the kernel receives a row per token and expert, whose columns are in the expert's order.

        Raises:
            ModelFormatError: the gate and the up projection of an expert have different orders, or groups of different sizes.
            ProviderUnsupportedError: with act-order, the kernel cannot serve the rank's number of inputs.
        """
        inputs, inner = (_with_one_block(_columns(experts)) for experts in (self._gate_up, self._down))
        has_order = not all(each.is_plain for each in (*inputs, *inner))
        if has_order and any(len(each.source) != self.spec.moe.hidden_size for each in inputs):
            raise ModelFormatError(f"{self.spec.name}: with act-order, all groups of inputs must have the same size")
        gate_up, down = self._repacked(self._gate_up, inputs), self._repacked(self._down, inner)
        self.zero_neighbor_rows(gate_up.scales, self.gate_up_bias)
        if has_order:
            rows = self._rows_in_order(inner)
            gate_up.take_rows(rows)
            if self.gate_up_bias is not None:
                self.gate_up_bias = _take_rows(self.gate_up_bias, rows)
            moe = replace(self.kernel.spec, top_k=1, intermediate_size=rows.shape[1] // 2)  # one expert per row
            self._make_kernel(type(self.kernel), moe)
        forward = self.operation(gate_up.codes, down.codes, gate_up.scales, down.scales, gate_up.zeros, down.zeros)
        return self._with_gather(forward, inputs) if has_order else forward

    def _with_gather(self, forward: ExpertsOp, inputs: list[Columns]) -> ExpertsOp:
        """Return the operation of experts whose inputs have these orders; `forward` takes one expert per row."""
        device = self.spec.moe.device
        orders = torch.stack([each.source for each in inputs]).to(device, torch.int32)
        gather = gather_columns
        if device.type == "cuda":
            from minisgl_backends.kernels import gather_columns as triton_version

            gather = triton_version.gather_columns

        def experts(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
            outputs = forward(gather(x, orders, topk_ids), topk_weights.reshape(-1, 1), topk_ids.reshape(-1, 1))
            return outputs.view(*topk_ids.shape, -1).sum(1)

        return experts

    def _rows_in_order(self, inner: list[Columns]) -> torch.Tensor:
        """Return the row of each output of gate and up, in the order of the down projection's inputs, int64 [E, 2 * I].

        Experts with fewer inputs than others are filled up with -1.
        """
        most = max(len(each.source) for each in inner)
        rows = torch.full((len(inner), 2, most), -1)
        for expert, columns in enumerate(inner):
            rows[expert, 0, : len(columns.source)] = columns.source
            rows[expert, 1, : len(columns.source)] = columns.source + self.spec.inner.size
        return rows.flatten(1).to(self.spec.moe.device)

    def _repacked(self, experts: list[list[CheckpointPart]], columns: list[Columns]) -> _StackedWeight:
        count = max(len(each.source) for each in columns)
        rows = sum(part.rows.size for part in experts[0])
        has_zeros = any(part.has_zeros() for parts in experts for part in parts)
        found = _StackedWeight(self.spec, rows, count, columns[0].block, has_zeros)
        for expert, parts in enumerate(experts):
            row = 0
            for part in parts:
                found.store(expert, row, part, columns[expert])
                row += part.rows.size
            parts.clear()
        return found


def gather_columns(x: torch.Tensor, orders: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
    """See `minisgl_backends.kernels.gather_columns`. This version runs on any device, and reads from it."""
    top_k = expert_ids.shape[1]
    out = x.new_empty(expert_ids.numel(), x.shape[1])
    for expert in torch.unique(expert_ids):
        rows = (expert_ids.flatten() == expert).nonzero()[:, 0]
        out[rows] = x[rows // top_k][:, orders[expert]]
    return out


def _columns(experts: list[list[CheckpointPart]]) -> list[Columns]:
    """Return the stored columns of each expert, whose parts share them.

    Raises:
        ModelFormatError: they do not.
    """
    found = [_stored_columns(experts[0][0])] * len(experts)
    for expert, (first, *others) in enumerate(experts):
        if first.has_index:
            found[expert] = _stored_columns(first)
            for other in others:
                if not _stored_columns(other).equals(found[expert]):
                    raise ModelFormatError(
                        f"the inputs of {first.name} and {other.name} are in different orders (act-order)"
                    )
    return found


def _stored_columns(part: CheckpointPart) -> Columns:
    """Return the columns of a part. Those in order are stored as they are: the kernels do not need their padding at the end."""
    columns, order = part.columns(), torch.arange(part.num_columns)
    if not torch.equal(columns.source[: len(order)], order):
        return columns
    return replace(columns, source=order, padding=torch.zeros_like(order, dtype=torch.bool), is_plain=True)


def _with_one_block(experts: list[Columns]) -> list[Columns]:
    """Return the columns with one number of inputs per scale: of the expert with the fewest, since others have whole groups."""
    blocks = [each.block for each in experts if each.block is not None]
    block = min(blocks, default=None)
    found = []
    for each in experts:
        groups = each.groups
        if block is not None and each.block is not None:
            groups = groups.repeat_interleave(each.block // block)[: -(-len(each.source) // block)]
        found.append(replace(each, block=block, groups=groups))
    return found


def _take_rows(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of each expert, [E, R, ...], from [E, N, ...] and their indices [E, R]. At index -1, they are 0."""
    taken = tensor.new_empty(*rows.shape, *tensor.shape[2:])
    for expert, indices in enumerate(rows):
        taken[expert] = tensor[expert, indices]
    taken[rows < 0] = 0
    return taken


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
