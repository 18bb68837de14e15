"""GEMMs on a Hopper GPU: checks every tiling of small-M GEMMs, then times it beside cuBLAS.

    python scripts/tune_small_m_gemm.py [--matrix 4096x1024] [--gated 34816x5120] [--rows 16 --rows 128 --rows 8192]

Prints the microseconds of one GEMM among many in a CUDA graph, with weights outside of the cache: by cuBLAS (and the activation's
kernel), by the tiling of `minisgl_backends.cuda.gemm_tiling.choose_tiling`, and by the three fastest tilings. Launches overlap
(PDL), as in a decode step. GEMMs of a gated MLP with more rows are repeated for 0.4 s, since the GPU lowers its clock when it
draws too much power.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

import click
import torch
import torch.nn.functional as F
from triton.testing import do_bench_cudagraph

from minisgl_backends.cuda.gated_gemm import HopperGatedGemm, worthwhile
from minisgl_backends.cuda.gemm_tiling import MAX_SMALL_M_ROWS, GemmTiling, choose_tiling
from minisgl_backends.cuda.small_m_gemm import ROW_SIZES, HopperSmallMGemm, StreamKWorkspace, supports_weight
from minisgl_backends.kernels.activation import silu_and_mul

MATRICES = ((7168, 5120), (5120, 5120), (5120, 17408), (4096, 1024), (1024, 2048), (1024, 3072))
GATED = ((34816, 5120), (6144, 1024))
"""Outputs and inputs of Qwen3-14B's and 0.6B's gate and up projection."""
MADE = {"device": "cuda", "dtype": torch.bfloat16}
COLD_BYTES = 600 << 20
"""Size of all copies of a matrix, ten times that of the L2 cache."""


def tilings(num_rows: int, matrix_rows: int, num_inputs: int, processors: int) -> Iterator[GemmTiling]:
    """Yield all useful tilings; `num_rows` is the number of rows that the kernel is compiled for."""
    for outputs in (64, 128):
        tiles = -(-matrix_rows // outputs)
        yield GemmTiling(outputs)
        yield GemmTiling(outputs, cluster=2)
        yield GemmTiling(outputs, cluster=4)
        for row_parts in (1, 2, 4):
            blocks = tiles * row_parts
            if row_parts > 1:
                yield GemmTiling(outputs, row_parts=row_parts)
            if blocks <= processors:
                yield from (
                    GemmTiling(outputs, row_parts=row_parts, num_blocks=count)
                    for count in {blocks, processors // blocks * blocks}
                )
            for splits in (2, 3, 4, 5, 6, 8):
                if 40 <= blocks * splits <= processors and row_parts * splits <= 8 and splits <= num_inputs // 64:
                    yield GemmTiling(outputs, splits=splits, row_parts=row_parts)


def wrong(gemm: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, weight: torch.Tensor, *, gated: bool) -> str:
    """Return how a GEMM differs from float64, or an empty string."""
    expected = (x.double() @ weight.double().T).bfloat16()
    if gated:
        gate, up = expected.float().chunk(2, -1)
        expected = (F.silu(gate).bfloat16().float() * up).bfloat16()
    first, second = gemm(x), gemm(x)
    error = float((first.double() - expected.double()).norm() / expected.double().norm())
    if not error < 5e-3:
        return f"off by {error:.1e}"
    return "" if torch.equal(first, second) else "not deterministic"


def activated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute a gated MLP's gate and up GEMM by cuBLAS, and the activation."""
    return silu_and_mul(F.linear(x, weight))


def microseconds(calls: list[Callable[[], torch.Tensor]], *, seconds: float = 0.2) -> float:
    """Return the median of one call in microseconds, over ten graph replays that take `seconds` together."""
    found = do_bench_cudagraph(lambda: [call() for call in calls], rep=int(seconds * 100), return_mode="median")
    return float(found) * 1000 / len(calls)


def measure(shape: tuple[int, int], all_rows: tuple[int, ...], scratch: StreamKWorkspace, *, gated: bool) -> bool:
    """Print a line per number of rows; return False if a GEMM is wrong."""
    count = max(3, COLD_BYTES // (2 * shape[0] * shape[1]))
    weights = [torch.randn(shape, **MADE) / shape[1] ** 0.5 for _ in range(count)]
    if not supports_weight(weights[0], None, gated=gated):
        raise click.UsageError(f"the kernel takes no matrix of {shape[0]}x{shape[1]}{' gated' if gated else ''}")
    few = tuple(rows for rows in all_rows if rows <= MAX_SMALL_M_ROWS)
    right = measure_few(weights, few, scratch, gated=gated)
    return right and (not gated or measure_many(weights, [rows for rows in all_rows if rows > MAX_SMALL_M_ROWS]))


def measure_many(weights: list[torch.Tensor], all_rows: list[int]) -> bool:
    """Measure a gated MLP's GEMM with more than MAX_SMALL_M_ROWS rows."""
    shape, all_right = weights[0].shape, True
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    gemms = [HopperGatedGemm(weight) for weight in weights]
    for rows in all_rows:
        x = torch.randn(rows, shape[1], **MADE)
        if reason := wrong(gemms[0], x, weights[0], gated=True):
            print(f"WRONG: {tuple(shape)}, {rows} rows: {reason}", flush=True)
            all_right = False
            continue
        cublas = microseconds([partial(activated, x, weight) for weight in weights], seconds=0.4)
        own = microseconds([partial(gemm, x) for gemm in gemms], seconds=0.4)
        taken = worthwhile(rows, shape[0] // 2, shape[1], processors)
        name = f"{shape[0]}x{shape[1]} gated"
        print(f"{name:18} {rows:4} rows: cuBLAS {cublas:6.1f}  own {own:6.1f}{', taken' if taken else ''}", flush=True)
    return all_right


def measure_few(
    weights: list[torch.Tensor], all_rows: tuple[int, ...], scratch: StreamKWorkspace, *, gated: bool
) -> bool:
    """Measure GEMMs with at most MAX_SMALL_M_ROWS rows."""
    shape = (weights[0].shape[0], weights[0].shape[1])
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    chosen = {size: choose_tiling(size, *shape, processors) for size in ROW_SIZES}
    possible = [size for size in ROW_SIZES if size % chosen[size].row_multiple == 0]
    made_for = {rows: next(size for size in possible if size >= rows) for rows in all_rows}
    found: dict[int, dict[GemmTiling, list[HopperSmallMGemm]]] = {}
    for rows, size in made_for.items():  # all first, since they are compiled in parallel
        found[rows] = {}
        for tiling in dict.fromkeys([chosen[size], *tilings(size, *shape, processors)]):
            if size % tiling.row_multiple:
                continue
            options = {"gated": gated, "row_sizes": [size], "choose": lambda *_, tiling=tiling: tiling}
            found[rows][tiling] = [HopperSmallMGemm(weight, None, scratch, **options) for weight in weights]
    all_right = True
    for rows, gemms_of in found.items():
        x = torch.randn(rows, shape[1], **MADE)
        cublas = [partial(activated if gated else F.linear, x, weight) for weight in weights]
        times = []
        for tiling, gemms in gemms_of.items():
            if reason := wrong(gemms[0], x, weights[0], gated=gated):
                print(f"WRONG: {shape}, {rows} rows, {tiling}: {reason}", flush=True)
                all_right = False
            else:
                times.append((microseconds([partial(gemm, x) for gemm in gemms]), str(tiling)))
        own = next((time for time, tiling in times if tiling == str(chosen[made_for[rows]])), float("nan"))
        best = "; ".join(f"{time:.1f} {tiling}" for time, tiling in sorted(times)[:3])
        name = f"{shape[0]}x{shape[1]}{' gated' if gated else ''}"
        print(
            f"{name:18} {rows:4} rows: cuBLAS {microseconds(cublas):6.1f}  chosen {own:6.1f}  best {best}", flush=True
        )
    return all_right


def shape_of(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> list[tuple[int, int]]:
    """Return the numbers of values such as ``4096x1024``."""
    try:
        return [(int(rows), int(cols)) for rows, cols in (value.split("x") for value in values)]
    except ValueError as error:
        raise click.BadParameter("must be two numbers, such as 4096x1024") from error


@click.command()
@click.option("--matrix", multiple=True, callback=shape_of, help="Outputs x inputs; those of Qwen3-14B and 0.6B.")
@click.option("--gated", multiple=True, callback=shape_of, help="The same of a gated MLP's matrix, gate before up.")
@click.option(
    "--rows", multiple=True, type=click.IntRange(1, 16_384), default=(16, 64, 128, 192, MAX_SMALL_M_ROWS, 8192)
)
def main(matrix: list[tuple[int, int]], gated: list[tuple[int, int]], rows: tuple[int, ...]) -> None:
    """Check and time."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise click.UsageError("this needs a Hopper GPU")
    scratch = StreamKWorkspace(torch.device("cuda"))
    plain = matrix or ([] if gated else MATRICES)
    paired = gated or ([] if matrix else GATED)
    right = [measure(shape, rows, scratch, gated=False) for shape in plain]
    right += [measure(shape, rows, scratch, gated=True) for shape in paired]
    sys.exit(0 if all(right) else 1)


if __name__ == "__main__":
    main()
