"""Variants and launch of int4_gemm.cu, a small-M GEMM with 4-bit weights for Hopper.

Shape legend: M rows of x, N outputs, K inputs; T tiles and C chunks as `minisgl_backends.kernels.int4_weight` describes them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from minisgl_backends.cuda.compiler import program
from minisgl_backends.cuda.driver import TensorMap, mappable
from minisgl_backends.cuda.gemm_common import (
    ALIGNMENT_BYTES,
    THREADS,
    BlockResources,
    compiled,
    load_kernel,
    wgmma_source,
)
from minisgl_backends.cuda.gemm_tiling import MAX_SMALL_M_ROWS, GemmTiling
from minisgl_backends.cuda.small_m_gemm import StreamKWorkspace
from minisgl_backends.kernels import int4_stages
from minisgl_backends.kernels.int4_stages import CODE_BYTES, INPUTS, SCALE_BYTES
from minisgl_backends.kernels.int4_weight import Int4Weight
from minisgl_backends.kernels.packed_matrix import TILE

ROW_SIZES = (8, 16, 32, 48, 64, 96, 128, 160, 192, 224, MAX_SMALL_M_ROWS)
"""Numbers of rows with a kernel of their own; other numbers of rows are padded."""
_OUTPUTS = 2 * TILE
_MAX_BLOCK_ROWS = 128
"""Rows per thread block whose sums and dequantized weights fit into registers."""
_MAX_STAGES = 16
MAX_PAIRED_ROWS = {1: 32, 2: 32, 4: 8}
"""Largest number of rows for which an SM holds thread blocks of two GEMMs, by scales per stage. With more, registers spill."""
HALVES = (BlockResources(115 << 10), BlockResources(108 << 10, THREADS + 96))
"""The halves of an SM that two GEMMs take; see PAIRED in int4_gemm.cu.

A thread block of the first half needs more than half of the 228 KiB of shared memory, one of the second half more than half of
the 65,536 registers. So an SM holds one of each, but not two of the same.
"""


@dataclass(frozen=True, slots=True)
class Variant:
    """Compile-time parameters of int4_gemm.cu.

    Attributes:
        rows: largest number of rows of x.
        cluster, row_parts: see `GemmTiling`.
        scales: scales per output and stage, 1, 2 or 4.
        gated: fuse the gated MLP's activation.
        has_bias: add a bias.
        half: index of the thread block's half of an SM in `HALVES`, or None for a whole SM.
    """

    rows: int
    cluster: int
    row_parts: int
    scales: int
    gated: bool
    has_bias: bool
    half: int | None = None

    @property
    def resources(self) -> BlockResources:
        """Return what a thread block requests."""
        return BlockResources() if self.half is None else HALVES[self.half]

    @property
    def block_rows(self) -> int:
        """Return the rows per thread block."""
        return self.rows // self.row_parts

    @property
    def box_rows(self) -> int:
        """Return the rows of x that a thread block fetches at a time, FETCHED_ROWS of int4_gemm.cu.

        A stage has two boxes of x, which the thread blocks with the same rows share. Up to two blocks fetch whole boxes. Of four,
        two fetch each box, half of its rows each, rounded up to 8.
        """
        return -(-self.block_rows // 16) * 8 if self.cluster == 4 else self.block_rows

    @property
    def cluster_blocks(self) -> int:
        """Return the thread blocks per cluster."""
        return self.cluster * self.row_parts

    @property
    def stages(self) -> int:
        """Return the pipeline stages: as many as fit into shared memory."""
        # Codes and scales of a stage, as `pack_stages` returns them. The rows of x are swizzled, so stages are aligned.
        packed = -(-2 * (CODE_BYTES + self.scales * SCALE_BYTES) // 1024) * 1024
        stage = self.block_rows * INPUTS * 2 + packed
        staged = min(self.block_rows, 32) * (2 * _OUTPUTS + 16)  # rows for the store, see small_m_gemm.py
        return int(min(_MAX_STAGES, (self.resources.shared_bytes - ALIGNMENT_BYTES - staged) // stage))

    def source(self) -> str:
        """Return the program's source."""
        macros = {
            "ROWS": self.block_rows,
            "CLUSTER": self.cluster,
            "ROW_PARTS": self.row_parts,
            "STAGES": self.stages,
            "SCALES": self.scales,
            "GATED": self.gated,
            "HAS_BIAS": self.has_bias,
            "PAIRED": self.half is not None,
        }
        return program("int4_gemm.cu", macros, wgmma_source(self.block_rows, from_registers=True))


def choose_tiling(num_rows: int, num_output_blocks: int, num_sms: int) -> GemmTiling:
    """Return the tiling of a GEMM: Stream-K, which was faster on an H200 than a split of K over a cluster.

    An output block has 128 outputs, or 64 gate and 64 up outputs of a gated MLP.
    """
    if num_rows <= _MAX_BLOCK_ROWS:
        return GemmTiling(_OUTPUTS, cluster=2)
    return GemmTiling(_OUTPUTS, cluster=1 if num_output_blocks >= num_sms else 4, row_parts=2)


class HopperInt4Gemm:
    """``x @ weight.T + bias`` of few rows; for a gated MLP, ``silu(gate) * up`` of the result's halves.

    Weights have the values that `Int4Weight.dequantize` returns, but without rounding to bfloat16 for up to 16 rows. Results are
    rounded where torch rounds.
    """

    def __init__(
        self,
        weight: Int4Weight,
        stages: torch.Tensor,
        bias: torch.Tensor | None,
        workspace: StreamKWorkspace,
        *,
        half: int = 0,
        choose: Callable[[int, int, int], GemmTiling] = choose_tiling,
    ) -> None:
        """Prepare a weight for which `supports_weight` is True, and start compiling.

        Args:
            weight: the weight, whose codes and scales are not read.
            stages: the weight's codes and scales, packed by `pack_stages`.
            bias: one value per output, or None.
            workspace: the CUDA stream's workspace.
            half: index of the half of each SM that GEMMs of few rows take. If it differs from that of the next GEMM, the next one
                starts to read its weights while this one runs.
            choose: selects the tiling, with the arguments of `choose_tiling`.
        """
        self._weight, self._stages, self._bias, self._workspace = weight, stages, bias, workspace
        self._num_outputs = weight.num_outputs // (1 + weight.gated)
        self._num_output_blocks, self._num_chunks, _, size = stages.shape
        num_sms = torch.cuda.get_device_properties(stages.device).multi_processor_count
        scales = (size - CODE_BYTES) // SCALE_BYTES
        self._variants: dict[int, tuple[Variant, GemmTiling]] = {}
        for rows in ROW_SIZES:
            tiling = choose(rows, self._num_output_blocks, num_sms)
            shape = tiling.cluster, tiling.row_parts, scales
            variant = Variant(
                rows, *shape, weight.gated, bias is not None, half if rows <= MAX_PAIRED_ROWS[scales] else None
            )
            self._variants[rows] = variant, tiling
            compiled(variant)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [M, N] from x, [M, K or more], by one launch per MAX_SMALL_M_ROWS rows."""
        out = torch.empty(len(x), self._num_outputs, dtype=x.dtype, device=x.device)
        x = mappable(x[:, : self._weight.num_inputs])
        for start in range(0, len(x), MAX_SMALL_M_ROWS):
            self._multiply(x[start : start + MAX_SMALL_M_ROWS], out[start : start + MAX_SMALL_M_ROWS])
        return out

    def _multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        variant, tiling = self._variants[next(rows for rows in ROW_SIZES if len(x) <= rows)]
        kernel, max_blocks = load_kernel(variant, "int4_gemm", x.device)
        steps = -(-self._num_output_blocks // variant.cluster) * self._num_chunks
        num_blocks = tiling.num_stream_k_blocks(max_blocks, steps)
        x_map = TensorMap(x, (variant.box_rows, 64))
        bias = out if self._bias is None else self._bias  # `out` is a placeholder, which is not read
        workspace = self._workspace.partials, self._workspace.arrived
        sizes = len(x), self._num_outputs, self._num_output_blocks, self._num_chunks
        kernel.launch(num_blocks, (self._stages, x_map, out, bias, *workspace, *sizes))


def supports_weight(weight: Int4Weight) -> bool:
    """Return True if `HopperInt4Gemm` supports this weight."""
    return (
        weight.codes.is_cuda
        and weight.scales.dtype == torch.bfloat16
        and int4_stages.supports_weight(weight)
        and weight.num_outputs % (8 * (1 + weight.gated)) == 0
        and weight.num_inputs % 8 == 0
        and weight.num_inputs > 0  # TMA maps no empty tensor
    )
