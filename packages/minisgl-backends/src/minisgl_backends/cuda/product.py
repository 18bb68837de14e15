"""Products of few rows by product.cu: what it is compiled for, and its launch.

Shape legend: M rows of x, N outputs, K inputs. A gated MLP's matrix has 2 * N rows, gate above up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from minisgl_backends.cuda.compiler import compiled_later, program
from minisgl_backends.cuda.cut import MAX_ROWS, Cut, cut
from minisgl_backends.cuda.driver import Kernel, TensorMap
from minisgl_backends.cuda.products import DEPTH, SHARED_BYTES, THREADS, multiply, takes_matrix, takes_rows

ROW_SIZES = (*range(16, 64, 16), *range(64, MAX_ROWS + 1, 8))
"""Rows of x that there is a kernel for, where the `Cut` allows so many; fewer are padded."""
_MOST_STAGES = 16


@dataclass(frozen=True, slots=True)
class Variant:
    """What product.cu is compiled for.

    Attributes:
        rows: of x at most.
        outputs: see `Cut`.
        cluster: likewise.
        splits: likewise.
        row_parts: likewise.
        gated: whether it is a gated MLP's.
        has_bias: whether there is one.
    """

    rows: int
    outputs: int
    cluster: int
    splits: int
    row_parts: int
    gated: bool
    has_bias: bool

    @property
    def block_rows(self) -> int:
        """Rows of a thread block."""
        return self.rows // self.row_parts

    @property
    def box_rows(self) -> int:
        """Rows that a thread block fetches at once, for all of its cluster that share x."""
        return -(-self.block_rows // (8 * self.cluster)) * 8

    @property
    def cluster_blocks(self) -> int:
        """Thread blocks of a cluster."""
        return self.cluster * self.splits * self.row_parts

    @property
    def stages(self) -> int:
        """Of the ring, as many as fit."""
        stage = (self.outputs + self.block_rows) * DEPTH * 2
        # Rows that wait to be stored, 32 at a time for each that store apart.
        waiting = 32 * (2 * self.outputs + 16) * (2 if self.outputs == 64 else 1)
        return int(min(_MOST_STAGES, (SHARED_BYTES - 1024 - waiting) // stage))

    def source(self) -> str:
        """The program."""
        defined = {
            "ROWS": self.block_rows,
            "OUTPUTS": self.outputs,
            "CLUSTER": self.cluster,
            "SPLITS": self.splits,
            "ROW_PARTS": self.row_parts,
            "STAGES": self.stages,
            "GATED": int(self.gated),
            "HAS_BIAS": int(self.has_bias),
        }
        group_rows = self.block_rows // 2 if self.outputs == 64 else self.block_rows
        return program("product.cu", defined).replace("#include MULTIPLY", multiply(group_rows))


@cache
def _kernel(variant: Variant, device: torch.device) -> tuple[Kernel, int]:
    """And how many thread blocks the device holds."""
    with torch.cuda.device(device):
        cubin = compiled_later(variant.source()).result()
        sizes = {"shared_bytes": SHARED_BYTES, "cluster": variant.cluster_blocks}
        kernel = Kernel(cubin, "product", num_threads=THREADS, **sizes)
        return kernel, kernel.most_blocks()


class StreamScratch:
    """Where thread blocks leave sums of other ones' tiles; all products of a stream share one.

    Attributes:
        parts: float32.
        arrived: which thread blocks' are there, int32; 0 between launches.
    """

    def __init__(self, device: torch.device) -> None:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.parts = torch.empty(processors * 128 * MAX_ROWS, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(processors, dtype=torch.int32, device=device)


class HopperProduct:
    """``x @ weight.T + bias`` of few rows; for a gated MLP, ``silu(gate) * up`` of its halves, rounded where torch rounds."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        scratch: StreamScratch,
        *,
        gated: bool = False,
        row_sizes: Sequence[int] = ROW_SIZES,
        choose: Callable[[int, int, int, int], Cut] = cut,
    ) -> None:
        """Keep the matrix, and begin to compile for it.

        Args:
            weight: one that `fits`, [N, K], or [2 * N, K] where `gated`.
            bias: as long as the matrix, or None.
            scratch: of the device.
            gated: whether it is a gated MLP's.
            row_sizes: rows of x to have kernels for, ascending.
            choose: how to cut it; called with what `cut` takes.
        """
        self._weight, self._bias, self._scratch, self._gated = weight, bias, scratch, gated
        self._num_outputs, self._num_inputs = len(weight) // (1 + gated), weight.shape[1]
        processors = torch.cuda.get_device_properties(weight.device).multi_processor_count
        self._ways: dict[int, tuple[Variant, Cut, TensorMap]] = {}
        maps: dict[int, TensorMap] = {}
        for rows in row_sizes:
            way = choose(rows, len(weight), self._num_inputs, processors)
            if rows % way.row_multiple:
                continue
            variant = Variant(rows, way.outputs, way.cluster, way.splits, way.row_parts, gated, bias is not None)
            compiled_later(variant.source())
            box = way.outputs // (1 + gated) // way.row_parts
            if box not in maps:
                maps[box] = TensorMap(weight, (box, DEPTH))
            self._ways[rows] = variant, way, maps[box]

    def takes(self, x: torch.Tensor) -> bool:
        """Whether x, with two dimensions, is [M, K] of a kind that the kernel reads."""
        return 0 < len(x) <= max(self._ways) and takes_rows(x, self._weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x that it takes, [M, K] to [M, N]."""
        rows = next(rows for rows in self._ways if len(x) <= rows)
        variant, way, weight_map = self._ways[rows]
        kernel, most = _kernel(variant, x.device)
        columns = way.outputs // (1 + self._gated) * way.cluster
        tiles, group = -(-self._num_outputs // columns), variant.cluster_blocks
        if way.splits > 1:
            num_blocks = tiles * group
        else:
            steps = tiles * (self._num_inputs // DEPTH)
            num_blocks = min((way.num_blocks or most) // group, most // group, steps) * group
        out = torch.empty(len(x), self._num_outputs, dtype=x.dtype, device=x.device)
        x_map = TensorMap(x, (variant.box_rows, DEPTH))
        bias = out if self._bias is None else self._bias
        scratch = self._scratch
        sizes = len(x), self._num_outputs, self._num_inputs
        kernel.launch(num_blocks, (weight_map, x_map, out, bias, scratch.parts, scratch.arrived, *sizes))
        return out


def fits(weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool) -> bool:
    """Whether `HopperProduct` takes this matrix, with this bias."""
    return (
        takes_matrix(weight)
        and (bias is None or (bias.dtype == weight.dtype and bias.is_contiguous() and bias.device == weight.device))
        and len(weight) % (8 * (1 + gated)) == 0
    )
