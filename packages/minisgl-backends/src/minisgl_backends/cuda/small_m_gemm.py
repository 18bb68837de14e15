"""Variants and launch of small_m_gemm.cu, a small-M GEMM for Hopper.

Shape legend: M rows of x, N outputs, K inputs. A gated MLP's matrix has 2 * N rows, gate before up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from minisgl_backends.cuda.compiler import program
from minisgl_backends.cuda.driver import TensorMap
from minisgl_backends.cuda.gemm_common import (
    ALIGNMENT_BYTES,
    LINE_BYTES,
    SHARED_BYTES,
    BlockResources,
    can_load_input,
    can_load_weight,
    compiled,
    load_kernel,
    wgmma_source,
)
from minisgl_backends.cuda.gemm_tiling import MAX_SMALL_M_ROWS, GemmTiling, choose_fp8_tiling, choose_tiling
from minisgl_core.utils.fp8 import FP8

ROW_SIZES = (*range(16, 64, 16), *range(64, MAX_SMALL_M_ROWS + 1, 8))
"""Numbers of rows with a kernel of their own, if the `GemmTiling` allows them; other numbers of rows are padded."""
_MAX_STAGES = 16


@dataclass(frozen=True, slots=True)
class Variant:
    """Compile-time parameters of small_m_gemm.cu.

    Attributes:
        rows: largest number of rows of x.
        outputs, cluster, splits, row_parts: see `GemmTiling`.
        gated: fuse the gated MLP's activation.
        has_bias: add a bias.
        fp8: x and weights are in FP8.
    """

    rows: int
    outputs: int
    cluster: int
    splits: int
    row_parts: int
    gated: bool
    has_bias: bool
    fp8: bool = False

    @property
    def block_rows(self) -> int:
        """Return the rows per thread block."""
        return self.rows // self.row_parts

    @property
    def box_rows(self) -> int:
        """Return the rows of x that a thread block loads for all thread blocks that share x."""
        return -(-self.block_rows // (8 * self.cluster)) * 8

    @property
    def cluster_blocks(self) -> int:
        """Return the thread blocks per cluster."""
        return self.cluster * self.splits * self.row_parts

    @property
    def resources(self) -> BlockResources:
        """Return what a thread block requests: a whole SM."""
        return BlockResources()

    @property
    def stages(self) -> int:
        """Return the pipeline stages: as many as fit into shared memory."""
        stage = (self.outputs + self.block_rows) * LINE_BYTES
        # Rows are staged for the store, 32 at a time for each group of threads that stores.
        staged = 32 * (2 * self.outputs + 16) * (2 if self.outputs == 64 else 1)
        return int(min(_MAX_STAGES, (SHARED_BYTES - ALIGNMENT_BYTES - staged) // stage))

    def source(self) -> str:
        """Return the program's source."""
        macros = {
            "ROWS": self.block_rows,
            "OUTPUTS": self.outputs,
            "CLUSTER": self.cluster,
            "SPLITS": self.splits,
            "ROW_PARTS": self.row_parts,
            "STAGES": self.stages,
            "GATED": self.gated,
            "HAS_BIAS": self.has_bias,
            "FP8": self.fp8,
        }
        warpgroup_rows = self.block_rows // 2 if self.outputs == 64 else self.block_rows
        return program("small_m_gemm.cu", macros, wgmma_source(warpgroup_rows, dtype="e4m3" if self.fp8 else "bf16"))


def compile_variants(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    gated: bool,
    row_sizes: Sequence[int] = ROW_SIZES,
    choose: Callable[[int, int, int, int], GemmTiling] | None = None,
) -> list[tuple[Variant, GemmTiling]]:
    """Start compiling for a weight, which need not be loaded, and return the variants; see `HopperSmallMGemm`."""
    num_sms = torch.cuda.get_device_properties(weight.device).multi_processor_count
    choose = choose or (choose_fp8_tiling if weight.dtype == FP8 else choose_tiling)
    variants = []
    for rows in row_sizes:
        tiling = choose(rows, len(weight), weight.shape[1], num_sms)
        if rows % tiling.row_multiple:
            continue
        shape = tiling.outputs, tiling.cluster, tiling.splits, tiling.row_parts
        variants.append((Variant(rows, *shape, gated, bias is not None, weight.dtype == FP8), tiling))
        compiled(variants[-1][0])
    return variants


class StreamKWorkspace:
    """Partial sums of Stream-K tiles that several thread blocks compute. All GEMMs of a CUDA stream share one workspace.

    Attributes:
        partials: partial sums, float32.
        arrived: 1 for each thread block that has stored its partial sums, int32; 0 between launches.
    """

    def __init__(self, device: torch.device) -> None:
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.partials = torch.empty(num_sms * 128 * MAX_SMALL_M_ROWS, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(num_sms, dtype=torch.int32, device=device)


class HopperSmallMGemm:
    """``x @ weight.T + bias`` of few rows; for a gated MLP, ``silu(gate) * up`` of the result's halves.

    Results are rounded where torch rounds.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        workspace: StreamKWorkspace,
        *,
        scales: torch.Tensor | None = None,
        gated: bool = False,
        row_sizes: Sequence[int] = ROW_SIZES,
        choose: Callable[[int, int, int, int], GemmTiling] | None = None,
    ) -> None:
        """Prepare a weight matrix for which `supports_weight` is True, and start compiling.

        Args:
            weight: [N, K], or [2 * N, K] if `gated`, in bfloat16 or FP8.
            bias: one value per row of the weight, or None.
            workspace: the CUDA stream's workspace.
            scales: float32, one per row of an FP8 weight.
            gated: fuse the gated MLP's activation.
            row_sizes: numbers of rows to compile kernels for, ascending.
            choose: selects the tiling, with the arguments of `choose_tiling`, instead of the default.
        """
        self._weight, self._bias, self._scales, self._workspace, self._gated = weight, bias, scales, workspace, gated
        self._num_outputs, self._num_inputs = len(weight) // (1 + gated), weight.shape[1]
        self._block_k = LINE_BYTES // weight.element_size()
        self._variants: dict[int, tuple[Variant, GemmTiling, TensorMap]] = {}
        maps: dict[int, TensorMap] = {}
        for variant, tiling in compile_variants(weight, bias, gated=gated, row_sizes=row_sizes, choose=choose):
            box = tiling.outputs // (1 + gated) // tiling.row_parts
            if box not in maps:
                maps[box] = TensorMap(weight, (box, self._block_k))
            self._variants[variant.rows] = variant, tiling, maps[box]

    def supports_input(self, x: torch.Tensor) -> bool:
        """Return True if the kernel supports x, with two dimensions, or for an FP8 weight what `quantize_rows` returns for x."""
        is_supported = can_load_input(x, self._weight) if self._scales is None else x.dtype == torch.bfloat16
        return 0 < len(x) <= max(self._variants) and is_supported

    def __call__(self, x: torch.Tensor, x_scales: torch.Tensor | None = None) -> torch.Tensor:
        """Return [M, N] in bfloat16 from an x, [M, K], for which `supports_input` is True.

        For an FP8 weight, x and its scales are the results of `LinearOps.quantize_rows`.
        """
        rows = next(rows for rows in self._variants if len(x) <= rows)
        variant, tiling, weight_map = self._variants[rows]
        kernel, max_blocks = load_kernel(variant, "small_m_gemm", x.device)
        columns = tiling.outputs // (1 + self._gated) * tiling.cluster
        tiles = -(-self._num_outputs // columns)
        if tiling.splits > 1:
            num_blocks = tiles * variant.cluster_blocks
        else:
            steps = tiles * (self._num_inputs // self._block_k)
            num_blocks = tiling.num_stream_k_blocks(max_blocks, steps)
        out = torch.empty(len(x), self._num_outputs, dtype=torch.bfloat16, device=x.device)
        x_map = TensorMap(x, (variant.box_rows, self._block_k))
        bias = out if self._bias is None else self._bias  # `out` is a placeholder, which is not read
        workspace = self._workspace.partials, self._workspace.arrived
        sizes = len(x), self._num_outputs, self._num_inputs
        kernel.launch(num_blocks, (weight_map, x_map, out, bias, x_scales, self._scales, *workspace, *sizes))
        return out


def supports_weight(weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool) -> bool:
    """Return True if `HopperSmallMGemm` supports this weight and bias."""
    return (
        can_load_weight(weight, torch.bfloat16, FP8)
        and (bias is None or (bias.dtype == torch.bfloat16 and bias.is_contiguous() and bias.device == weight.device))
        and len(weight) % (8 * (1 + gated)) == 0
    )
