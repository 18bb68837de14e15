"""Tiling of small_m_gemm.cu: how a GEMM is distributed over thread blocks.

Shape legend: M rows of x, N outputs, K inputs. A gated MLP's matrix has 2 * N rows, gate before up. As arguments,
`num_rows` is M, `matrix_rows` is N, or 2 * N of a gated MLP, and `num_inputs` is K.
"""

from dataclasses import dataclass

from minisgl_backends.cuda.gemm_common import BLOCK_K, LINE_BYTES

MAX_SMALL_M_ROWS = 256
"""Largest number of rows of x that small_m_gemm.cu is compiled for."""
_SMALL_MATRIX = 8 << 20
"""Number of weights up to which the overlap with neighbouring kernels (PDL) matters more than the time of the GEMM itself."""


@dataclass(frozen=True, slots=True)
class GemmTiling:
    """Distribution of a GEMM over thread blocks; see small_m_gemm.cu.

    Attributes:
        outputs: outputs per tile, 64 or 128.
        cluster: neighbouring tiles that share x by multicast.
        splits: thread blocks per tile, each with a part of the inputs (split-K in a cluster); 1 for Stream-K.
        row_parts: thread blocks per tile, each with a part of the rows, that share the weights by multicast.
        num_blocks: thread blocks of the grid; None for as many as the device holds.
    """

    outputs: int
    cluster: int = 1
    splits: int = 1
    row_parts: int = 1
    num_blocks: int | None = None

    @property
    def row_multiple(self) -> int:
        """Return the number that the rows of a compiled kernel must be a multiple of."""
        return self.row_parts * (16 if self.outputs == 64 else 8)

    def num_stream_k_blocks(self, max_blocks: int, num_steps: int) -> int:
        """Return the thread blocks of the grid with Stream-K, whole clusters of them.

        Args:
            max_blocks: thread blocks that the device holds.
            num_steps: steps of all tiles, at least one per cluster.
        """
        per_cluster = self.cluster * self.row_parts
        wanted = min(self.num_blocks or max_blocks, max_blocks)
        return min(wanted // per_cluster, num_steps) * per_cluster


def worthwhile_rows(matrix_rows: int, num_inputs: int, *, gated: bool) -> int:
    """Return the largest number of rows for which small_m_gemm.cu is faster than cuBLAS, in a decode step on an H200.

    GEMMs with more rows are compute-bound, and cuBLAS has the higher throughput. After cuBLAS, the activation of a gated MLP is a
    separate kernel.
    """
    if matrix_rows * num_inputs <= _SMALL_MATRIX:
        return MAX_SMALL_M_ROWS
    return 240 if gated else 192


def choose_tiling(num_rows: int, matrix_rows: int, num_inputs: int, num_sms: int) -> GemmTiling:
    """Return the tiling that was fastest on an H200, over the matrices of Qwen3-0.6B, 14B, 30B-A3B, and of shards of 32B.

    `scripts/tune_small_m_gemm.py` measures all tilings.
    """
    tiles, num_k_blocks = -(-matrix_rows // 64), num_inputs // BLOCK_K
    if tiles > num_sms:
        return GemmTiling(128, cluster=1 if num_rows <= 64 else 2)
    if tiles >= 0.48 * num_sms:
        if num_rows <= 16 and num_k_blocks <= 16:  # prologue and epilogue of a thread block dominate
            return GemmTiling(128, num_blocks=-(-tiles // 2))
        if num_k_blocks >= 64 and tiles > 0.8 * num_sms and num_rows > 64 and tiles % 2 == 0:
            return GemmTiling(128, splits=2)
        if num_k_blocks < 64 or tiles > 0.8 * num_sms:
            return GemmTiling(64, num_blocks=tiles)
        if num_rows <= 64:
            return GemmTiling(64)
        pairs = -(-tiles // 2)
        return GemmTiling(128, num_blocks=max(num_sms // pairs, 1) * pairs)
    if num_rows > 144 and tiles <= num_sms // 8:
        return GemmTiling(64, splits=max(min(num_k_blocks // 16, 4), 1), row_parts=2)
    used_sms = (0.75 if num_rows > 128 and num_k_blocks > 32 else 0.53) * num_sms
    splits = min(8, int(used_sms / tiles + 0.5), num_k_blocks // 8)
    return GemmTiling(64, splits=splits) if splits > 1 else GemmTiling(64, num_blocks=tiles)


def choose_fp8_tiling(num_rows: int, matrix_rows: int, num_inputs: int, num_sms: int) -> GemmTiling:
    """Return the tiling of a GEMM in FP8 that was fastest on an H200, over the matrices of Qwen3-14B.

    For few rows or outputs, it is that of bfloat16, since a byte takes as long to read and to multiply. Otherwise, thread blocks
    share weights or x.
    """
    blocks, num_k_blocks = -(-matrix_rows // 128) * 2, num_inputs // LINE_BYTES
    if num_rows <= 96 or blocks < 0.48 * num_sms:
        return choose_tiling(num_rows, matrix_rows, num_inputs // 2, num_sms)
    if blocks > num_sms:
        return GemmTiling(128, cluster=4)
    return GemmTiling(128, row_parts=2, num_blocks=blocks if num_k_blocks < 64 else None)
