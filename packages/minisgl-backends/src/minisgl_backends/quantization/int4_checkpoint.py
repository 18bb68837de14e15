"""Linear layers of AWQ, GPTQ and compressed-tensors checkpoints, from the checkpoint's packed tensors to an `Int4Weight`.

An int32 has eight codes, along the dimension that is divided by 8 here. There are N outputs, K inputs and G groups:

- awq: ``qweight`` [K, N / 8], ``scales`` [G, N], ``qzeros`` [G, N / 8].
- gptq: ``qweight`` [K / 8, N], ``scales`` [G, N], ``qzeros`` [G, N / 8], and ``g_idx`` [K], the group of each input.
- compressed-tensors: ``weight_packed`` [N, K / 8], ``weight_scale`` [N, G], ``weight_zero_point`` [N / 8, G] and
  ``weight_g_idx`` [K].

With act-order, inputs are sorted by group. If this rank has only some inputs of a group, each block of 32 inputs
has its own scales. The rest of the last block of a group is padded with the zero point as the code, that is, with weights of 0.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from minisgl_backends.kernels.int4_weight import SYMMETRIC_ZERO, Int4Weight
from minisgl_backends.kernels.packed_matrix import TILE
from minisgl_core.contracts.checkpoint_quantization import Int4Format
from minisgl_core.contracts.layer import Targets
from minisgl_core.contracts.layer_methods import LinearMethod, LinearPart, LinearSpec
from minisgl_core.contracts.ops import LinearOp
from minisgl_core.contracts.ops.norm import silu_and_mul
from minisgl_core.contracts.shard import Shard, sharded_target
from minisgl_core.contracts.weights import WeightTarget
from minisgl_core.errors import ModelFormatError

Prepare = Callable[[Int4Weight, torch.Tensor | None], LinearOp]
"""Function of a weight and a bias that returns the layer's operation."""
_WORD = 8
"""Codes per int32."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position of each output's code in a word."""
_BLOCK = 32
"""Inputs per scale where a rank has parts of groups."""
_CHUNK = 1 << 18
"""Codes that are repacked at once, which bounds the temporary memory."""


def unpack(words: torch.Tensor) -> torch.Tensor:
    """Return the codes of int32 words in the order of their bits, uint8 [..., 8 * words]."""
    if not words.numel():
        return words.new_empty((*words.shape[:-1], _WORD * words.shape[-1]), dtype=torch.uint8)
    octets = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Inputs of this rank in the order in which they are stored.

    Attributes:
        source: column of the checkpoint's codes for each stored column, int64 [K].
        padding: True for stored columns of weights that are 0, bool [K]; their `source` is any column.
        block: inputs per scale; None for all.
        groups: group of each block, int64 [B].
        is_plain: the stored columns are the checkpoint's.
    """

    source: torch.Tensor
    padding: torch.Tensor
    block: int | None
    groups: torch.Tensor
    is_plain: bool

    @classmethod
    def of(cls, groups: torch.Tensor, size: int | None) -> "Columns":
        """Sort the columns by group.

        Args:
            groups: group of each of this rank's columns, int64 [K], on the CPU.
            size: inputs per group; None for one group.
        """
        order = torch.argsort(groups, stable=True)
        present, counts = torch.unique(groups, return_counts=True)
        if size is None or ((counts[:-1] == size).all() and (counts <= size).all()):  # the last group may be short
            pads, block = torch.zeros_like(counts), size
        else:
            pads, block = -counts % _BLOCK, _BLOCK
        sizes = counts + pads
        group_of = torch.arange(len(present)).repeat_interleave(sizes)  # for each stored column
        offsets = torch.arange(len(group_of)) - (sizes.cumsum(0) - sizes)[group_of]  # within its group
        padding = offsets >= counts[group_of]
        source = order[(counts.cumsum(0) - counts)[group_of] + offsets.masked_fill(padding, 0)]
        is_plain = torch.equal(source, torch.arange(len(groups)))
        step = block or max(len(group_of), 1)
        return cls(source, padding, block, present[group_of[::step]], is_plain)

    def equals(self, other: "Columns") -> bool:
        """Return True if the order is the same."""
        pairs = (self.source, other.source), (self.padding, other.padding), (self.groups, other.groups)
        return self.block == other.block and all(torch.equal(first, second) for first, second in pairs)


class CheckpointPart:
    """Packed tensors of one module on this rank.

    Attributes:
        name: name of the module.
        rows: this rank's shard of its rows.
        num_columns: inputs of this rank, without padding.
        has_index: True if the checkpoint may have the group of each input.
    """

    def __init__(self, part: LinearPart, spec: LinearSpec, checkpoint_format: Int4Format) -> None:
        self.name, self._columns, self._format = part.name, spec.columns, checkpoint_format
        self.rows, columns, self.num_columns = part.rows, spec.columns, spec.columns.unpadded_size
        self.has_index = checkpoint_format.layout == "gptq" or checkpoint_format.has_group_index
        # A group has all inputs if its size exceeds them. The kernels' block is a multiple of 32.
        most = -(-max(columns.total, 1) // _BLOCK) * _BLOCK
        self._group_size = checkpoint_format.group_size and min(checkpoint_format.group_size, most)
        size = self._group_size or max(columns.total, 1)
        self._groups = (
            Shard.whole(-(-columns.total // size)) if checkpoint_format.has_group_index else columns.in_blocks(size)
        )
        row_words, column_words = part.rows.in_blocks(_WORD), columns.in_blocks(_WORD)
        codes = {"awq": (columns, row_words), "gptq": (column_words, part.rows)}.get(
            checkpoint_format.layout, (part.rows, column_words)
        )
        self._shards = {"codes": codes, "scales": (self._groups, part.rows), "zeros": (self._groups, row_words)}
        names = ("qweight", "scales", "qzeros", "g_idx")
        if checkpoint_format.layout == "compressed-tensors":
            names = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx")
            self._shards |= {kind: self._shards[kind][::-1] for kind in ("scales", "zeros")}
        self._names = dict(zip(("codes", "scales", "zeros", "index"), names, strict=True))
        if not checkpoint_format.has_zero_points:
            del self._shards["zeros"]
        self._held = {
            kind: torch.empty(
                [shard.unpadded_size for shard in shards],
                dtype=spec.dtype if kind == "scales" else torch.int32,
                device=spec.device,
            )
            for kind, shards in self._shards.items()
        }
        self._index = (torch.arange(columns.start, columns.stop) // size).to(torch.int32)

    def targets(self) -> Targets:
        """Yield ``NAME.qweight`` and so on."""
        name = self.name
        for kind, shards in self._shards.items():
            yield f"{name}.{self._names[kind]}", sharded_target(self._held[kind], *shards)
        if self.has_index:
            is_optional, shape = not self._format.has_group_index, (self._columns.total,)
            yield (
                f"{name}.{self._names['index']}",
                WeightTarget(self._index, (self._columns.index,), optional=is_optional, shape=shape),
            )
        if self._format.layout == "compressed-tensors":  # the shapes of the other tensors say the same
            yield f"{name}.weight_shape", WeightTarget(torch.empty(2, dtype=torch.int64), optional=True, shape=(2,))

    def columns(self) -> Columns:
        """Return the order in which the loaded columns are stored.

        Raises:
            ModelFormatError: a group is out of range, or the inputs are not in the order of their groups without act-order.
        """
        size, columns = self._group_size, self._columns
        groups, most = self._index.long(), self._groups.total
        found = f"the checkpoint does not fit its config: {self.name}.{self._names['index']} has"
        if ((groups < 0) | (groups >= most)).any():
            raise ModelFormatError(f"{found} a group that is not in 0 to {most - 1}")
        expected = torch.arange(columns.start, columns.stop) // (size or max(columns.total, 1))
        if not self._format.has_group_index and not torch.equal(groups, expected):
            raise ModelFormatError(f"{found} another order than desc_act=false says; set desc_act=true in its config")
        return Columns.of(groups - self._groups.start, size)

    def scales(self, columns: Columns) -> torch.Tensor:
        """Return the scales of the blocks of `columns`, [B, rows]."""
        scales = self._held["scales"]
        scales = scales if self._format.layout != "compressed-tensors" else scales.t()
        return scales[columns.groups.to(scales.device)]

    def zeros(self, columns: Columns) -> torch.Tensor:
        """Return the zero points of the blocks of `columns`, uint8 [B, rows]. The checkpoint has zero points."""
        zeros = self._zero_points()
        assert zeros is not None
        return zeros[columns.groups.to(zeros.device)]

    def codes(self, columns: Columns) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield some rows and their codes in the order of `columns`, uint8 [rows, K], until these are all of this rank's rows."""
        count, device = self.rows.unpadded_size, self._held["codes"].device
        pads, source = columns.padding.nonzero()[:, 0].to(device), columns.source.to(device)
        zeros, pad_groups = self._zero_points(), columns.groups.to(device)[pads // _BLOCK]
        step = max(TILE, _CHUNK // max(len(source), 1) // TILE * TILE)
        for start in range(0, count, step):
            rows = slice(start, min(start + step, count))
            codes = self._codes(rows.start, rows.stop)
            if not columns.is_plain:
                codes = codes.index_select(1, source)
            if len(pads):
                codes[:, pads] = SYMMETRIC_ZERO if zeros is None else zeros[pad_groups, rows].t()
            yield rows, codes

    def has_zeros(self) -> bool:
        """Return True if a zero point is not 8."""
        zeros = self._zero_points()
        return zeros is not None and not bool((zeros == SYMMETRIC_ZERO).all())

    def _zero_points(self) -> torch.Tensor | None:
        """Return the zero points, uint8 [G, rows]; None if the checkpoint has none."""
        words = self._held.get("zeros")
        if words is None:
            return None
        if self._format.layout == "compressed-tensors":
            words = words.t()
        # Added to whole words, as GPTQModel does: a zero point of 0 is stored as a borrow from the next one.
        zeros = unpack(words + self._format.zero_point_offset * 0x11111111)
        if self._format.layout == "awq":
            zeros = _in_awq_order(zeros)
        return zeros[:, self._skipped_rows :][:, : self.rows.unpadded_size]

    @property
    def _skipped_rows(self) -> int:
        return self.rows.start % _WORD

    def _codes(self, start: int, stop: int) -> torch.Tensor:
        """Return the codes of this rank's rows from `start` to `stop`, uint8 [rows, K]."""
        words = self._held["codes"]
        if self._format.layout == "awq":
            first = self._skipped_rows + start
            words = words[:, first // _WORD : -(-(self._skipped_rows + stop) // _WORD)]
            return _in_awq_order(unpack(words))[:, first % _WORD :][:, : stop - start].t()
        words = words[:, start:stop].t() if self._format.layout == "gptq" else words[start:stop]
        return unpack(words)[:, self._columns.start % _WORD :][:, : self._columns.unpadded_size]


def _in_awq_order(codes: torch.Tensor) -> torch.Tensor:
    words: torch.Tensor = codes.view(*codes.shape[:-1], codes.shape[-1] // _WORD, _WORD)
    return words[..., _AWQ_ORDER].flatten(-2)


class CheckpointInt4Linear(LinearMethod):
    """A linear layer of a checkpoint with 4-bit integers."""

    def __init__(self, spec: LinearSpec, checkpoint_format: Int4Format, prepare: Prepare) -> None:
        super().__init__(spec)
        self._prepare = prepare
        self._parts = [CheckpointPart(part, spec, checkpoint_format) for part in spec.parts]
        self._bias = spec.empty(spec.out_features) if spec.bias else None
        # AutoGPTQ also stores biases for layers without a bias. They are loaded only to check that they are zero.
        self._unused_biases = (
            [torch.zeros(part.rows.unpadded_size, dtype=spec.dtype) for part in spec.parts]
            if checkpoint_format.layout == "gptq" and not spec.bias
            else []
        )

    def targets(self) -> Targets:
        """Yield the names of the packed tensors and of the bias of every part."""
        for part in self._parts:
            yield from part.targets()
        if self._bias is not None:
            yield from self.spec.row_targets("bias", self._bias)
        for each, held in zip(self.spec.parts, self._unused_biases, strict=False):
            target = WeightTarget(held, (each.rows.index,), optional=True, shape=(each.rows.total,))
            yield f"{each.name}.bias", target

    def prepare(self) -> LinearOp:
        """Repack. Parts whose inputs have different orders become weights of their own."""
        # In a row-parallel layer, only rank 0, which has column 0, adds the bias. The specs of the other ranks have none, so what
        # they load may be nonzero.
        if self.spec.columns.start == 0 and any(each.any() for each in self._unused_biases):
            raise ModelFormatError(f"the checkpoint does not fit its config: {self.spec.name} has a bias")
        orders = [part.columns() for part in self._parts]
        if all(each.equals(orders[0]) for each in orders):
            return self._prepare(self._weight(self._parts, orders[0], gated=self.spec.gated), self._bias)
        biases = (
            [None] * len(orders) if self._bias is None else torch.split(self._bias, [p.rows.size for p in self._parts])
        )
        ops = [
            self._prepare(self._weight([part], order, gated=False), bias)
            for part, order, bias in zip(self._parts, orders, biases, strict=True)
        ]
        gated = self.spec.gated

        def linear(x: torch.Tensor) -> torch.Tensor:
            out = torch.cat([op(x) for op in ops], -1)
            return silu_and_mul(out) if gated else out

        return linear

    def _weight(self, parts: list[CheckpointPart], columns: Columns, *, gated: bool) -> Int4Weight:
        weight = Int4Weight.empty(
            sum(part.rows.size for part in parts),
            len(columns.source),
            columns.block,
            self.spec.dtype,
            self.spec.device,
            order=None if columns.is_plain else columns.source.to(self.spec.device),
            has_zeros=any(part.has_zeros() for part in parts),
            gated=gated,
        )
        row, blocks = 0, slice(len(columns.groups))
        for part in parts:
            rows = weight.rows_of(row, part.rows.unpadded_size)
            weight.scales[blocks, rows] = part.scales(columns)
            if weight.zeros is not None:
                weight.zeros[blocks, rows] = part.zeros(columns)
            for chunk, codes in part.codes(columns):
                weight.store(rows[chunk], codes)
            row += part.rows.size
        return weight
