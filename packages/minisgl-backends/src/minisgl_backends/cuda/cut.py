"""Which way product.cu shares a product out over thread blocks.

Shape legend: M rows of x, N outputs, K inputs. A gated MLP's matrix has 2 * N rows, gate above up.
"""

from __future__ import annotations

from dataclasses import dataclass

from minisgl_backends.cuda.products import DEPTH

MAX_ROWS = 256
"""Of x, that product.cu can be compiled for."""
_SMALL_MATRIX = 8 << 20
"""Weights of a matrix that is read in so short a time that what overlaps with its neighbours counts for more."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is shared out over thread blocks; see product.cu.

    Attributes:
        outputs: of a tile, 64 or 128.
        cluster: neighbouring tiles that share x.
        splits: thread blocks of a tile, each with a part of the inputs; 1 for Stream-K.
        row_parts: thread blocks of a tile, each with a part of the rows, that share its weights.
        num_blocks: thread blocks; None for as many as the device holds.
    """

    outputs: int
    cluster: int = 1
    splits: int = 1
    row_parts: int = 1
    num_blocks: int | None = None

    @property
    def row_multiple(self) -> int:
        """Of which the rows are that product.cu can be compiled for."""
        return self.row_parts * (16 if self.outputs == 64 else 8)


def worthwhile_rows(matrix_rows: int, num_inputs: int, *, gated: bool) -> int:
    """How many rows product.cu multiplies in less time than cuBLAS, in a decode step on an H200.

    More are bound by arithmetic, of which cuBLAS does more at a time.

    Args:
        matrix_rows: N, or 2 * N of a gated MLP.
        num_inputs: K.
        gated: whether it is a gated MLP's, whose activation cuBLAS leaves to another kernel.
    """
    if matrix_rows * num_inputs <= _SMALL_MATRIX:
        return MAX_ROWS
    return 240 if gated else 192


def cut(num_rows: int, matrix_rows: int, num_inputs: int, num_processors: int) -> Cut:
    """The way that was fastest on an H200, over the matrices of Qwen3-0.6B, 14B, 30B-A3B and of 32B's ranks.

    Args:
        num_rows: of x.
        matrix_rows: N, or 2 * N of a gated MLP.
        num_inputs: K.
        num_processors: of the device.
    """
    tiles, depth = -(-matrix_rows // 64), num_inputs // DEPTH
    if tiles > num_processors:
        return Cut(128, cluster=1 if num_rows <= 64 else 2)
    if tiles >= 0.48 * num_processors:
        if num_rows <= 16 and depth <= 16:  # then what a thread block begins and ends with is most of it
            return Cut(128, num_blocks=-(-tiles // 2))
        if depth >= 64 and tiles > 0.8 * num_processors and num_rows > 64 and tiles % 2 == 0:
            return Cut(128, splits=2)
        if depth < 64 or tiles > 0.8 * num_processors:
            return Cut(64, num_blocks=tiles)
        if num_rows <= 64:
            return Cut(64)
        pairs = -(-tiles // 2)
        return Cut(128, num_blocks=max(num_processors // pairs, 1) * pairs)
    if num_rows > 144 and tiles <= num_processors // 8:
        return Cut(64, splits=max(min(depth // 16, 4), 1), row_parts=2)
    share = 0.75 if num_rows > 128 and depth > 32 else 0.53  # of the processors
    splits = min(8, int(share * num_processors / tiles + 0.5), depth // 8)
    return Cut(64, splits=splits) if splits > 1 else Cut(64, num_blocks=tiles)
