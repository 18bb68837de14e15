"""GEMMs of packed weights on a GPU: checks the Triton kernel against float64, then times tilings beside bfloat16 cuBLAS.

    python scripts/bench_packed_gemm.py [--format int4 --format Q4_K] [--rows 1 --rows 256] [--seconds 60]

Prints the microseconds of one GEMM among many in a CUDA graph, with weights outside of the L2 cache. The matrices are those of
Qwen3-8B. `int4` has groups of 128; the other formats are GGML's types. The last lines sum the times over the layers of the model.
The values of the weights are those of the kernel that dequantizes rows, which tests compare with other packages.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial

import click
import torch
import torch.nn.functional as F
import triton
from triton.runtime.errors import OutOfResources

from minisgl_backends.kernels import packed_gemm
from minisgl_backends.kernels.packed_gemm import PackedGemm
from minisgl_backends.kernels.packed_matrix import PackedMatrix, Packing
from minisgl_backends.kernels.packed_tiling import PackedTiling
from minisgl_backends.kernels.split_k import SplitKWorkspace
from minisgl_backends.quantization.gguf_types import TYPES
from tune_small_m_gemm import activated, microseconds

SHAPES = ((6144, 4096, False), (4096, 4096, False), (24576, 4096, True), (4096, 12288, False))
"""Qwen3-8B: outputs, inputs, and True for the gated projection."""
LAYERS = 36
FORMATS = {"int4": Packing("int4", 4, 0, sub=32, block=128)} | {name: each.packing for name, each in TYPES.items()}
COLD_BYTES = 500 << 20
WORKERS = 12
DEVICE = torch.device("cuda")
BFLOAT16 = torch.bfloat16


def random_matrix(packing: Packing, rows: int, columns: int, dtype: torch.dtype, *, gated: bool) -> PackedMatrix:
    """Return a packed weight of random codes and scales."""
    matrix = PackedMatrix.empty(packing, rows, columns, DEVICE, gated=gated)
    for plane in (matrix.codes, matrix.high):
        if plane is not None:
            plane.random_(-(1 << 15), (1 << 15) - 1)
    matrix.words.random_(-(1 << 31), (1 << 31) - 1)
    if packing.kind == "int4":
        pairs = matrix.words.view(dtype).view(*matrix.words.shape, 2)
        pairs[..., 0] = 0.2 / columns**0.5
        pairs[..., 1] = -(8 + (128 if dtype == BFLOAT16 else 1024))
    else:
        halves = matrix.words if matrix.superblocks is None else matrix.superblocks
        halves.view(torch.float16).normal_().mul_(0.2 / columns**0.5 / (1 if matrix.superblocks is None else 32))
    return matrix


def check(name: str, scratch: SplitKWorkspace) -> bool:
    """Compare every path with float64."""
    right, packing = True, FORMATS[name]
    for rows, columns in ((6144, 4096), (320, 4352)):
        for gated, dtype in ((False, BFLOAT16), (True, BFLOAT16), (True, torch.float16)):
            matrix = random_matrix(packing, rows, columns, dtype, gated=gated)
            known = torch.empty(len(matrix.codes) * 64, columns, dtype=dtype, device=DEVICE)
            PackedGemm(matrix, None, scratch, dtype)._dequantize(known)
            known = matrix.outputs(known.t().contiguous()).t().double()
            bias = torch.randn(rows, device=DEVICE, dtype=dtype)
            for tiling in (
                None,
                PackedTiling(64, 16, 4),
                PackedTiling(128, 32, 2, 8, 3),
                PackedTiling(128, 64, 1, 8, 2),
            ):
                gemm = PackedGemm(matrix, bias, scratch, dtype, tiling=tiling)
                for num_rows in (1, 17, 130, 1025):
                    x = torch.randn(num_rows, columns, device=DEVICE, dtype=dtype)
                    expected = x.double() @ known.T + bias.double()
                    if gated:
                        gate, up = expected.chunk(2, -1)
                        expected = F.silu(gate) * up
                    first, second = gemm(x), gemm(x)
                    error = float((first.double() - expected).norm() / expected.norm())
                    if not error < 8e-3 or not torch.equal(first, second):
                        case = f"{name} {rows}x{columns} gated={gated} {dtype} {num_rows} rows {tiling}"
                        print(f"WRONG: {case}: {error:.1e}", flush=True)
                        right = False
    print(f"{name}: {'all paths agree with float64' if right else 'some paths are WRONG'}", flush=True)
    return right


def tilings(num_rows: int, *, gated: bool) -> Iterator[PackedTiling]:
    """Yield useful tilings, the most promising first."""
    if num_rows <= 64:
        rows = max(16, triton.next_power_of_2(num_rows))
        for splits in (2, 4, 1) if gated else (8, 4, 12):
            yield PackedTiling(64, rows, splits, 4, 4)
            yield PackedTiling(128, rows, splits, 8, 3)
            yield PackedTiling(64, rows, splits, 4, 3)
        return
    yield PackedTiling(128, 128, 1, 8, 3)
    yield PackedTiling(64 if gated else 128, 256, 1, 8, 3)
    yield PackedTiling(64, 64, 1, 4, 3)


def compile_part(part: int, names: tuple[str, ...], all_rows: tuple[int, ...]) -> None:
    """Fill Triton's cache with every WORKERS-th variant."""
    scratch = SplitKWorkspace(DEVICE)
    variants = [
        (name, gated, rows, tiling)
        for name in names
        for rows in sorted({max(16, rows) for rows in all_rows})
        for gated in (False, True)
        for tiling in (None, *tilings(rows, gated=gated))
    ]
    for name, gated, rows, tiling in variants[part::WORKERS]:
        for outputs in (24576,) if gated else (6144, 4096):
            matrix = random_matrix(FORMATS[name], outputs, 4096, BFLOAT16, gated=gated)
            packed_gemm.MAX_FUSED_ROWS = 64 if tiling is None else 1024
            try:
                PackedGemm(matrix, None, scratch, BFLOAT16, tiling=tiling)(
                    torch.randn(rows, 4096, device=DEVICE).bfloat16()
                )
            except OutOfResources:
                continue


def measure_cublas(num_rows: int, shape: tuple[int, int, bool]) -> float:
    """Return the microseconds of a GEMM in bfloat16."""
    rows, columns, gated = shape
    x = torch.randn(num_rows, columns, device=DEVICE).bfloat16()
    count = max(3, COLD_BYTES // (2 * rows * columns))
    plain = [torch.randn(rows, columns, device=DEVICE, dtype=BFLOAT16) for _ in range(count)]
    return microseconds([partial(activated if gated else F.linear, x, each) for each in plain])


def measure(
    name: str, num_rows: int, shape: tuple[int, int, bool], cublas: float, seconds: float
) -> tuple[float, float]:
    """Print a line and the best tilings; return the microseconds as chosen, and of the best tiling."""
    (rows, columns, gated), stop = shape, time.monotonic() + seconds
    scratch, x = SplitKWorkspace(DEVICE), torch.randn(num_rows, columns, device=DEVICE).bfloat16()
    one = random_matrix(FORMATS[name], rows, columns, BFLOAT16, gated=gated)
    size = sum(each.nbytes for each in (one.codes, one.high, one.words, one.superblocks) if each is not None)
    matrices = [
        random_matrix(FORMATS[name], rows, columns, BFLOAT16, gated=gated) for _ in range(max(3, COLD_BYTES // size))
    ]

    def timed(tiling: PackedTiling | None) -> float:
        gemms = [PackedGemm(each, None, scratch, BFLOAT16, tiling=tiling) for each in matrices]
        return microseconds([partial(each, x) for each in gemms])

    chosen, times = timed(None), []
    fused, packed_gemm.MAX_FUSED_ROWS = packed_gemm.MAX_FUSED_ROWS, 1024
    for tiling in tilings(num_rows, gated=gated):
        if time.monotonic() < stop:
            try:
                times.append((timed(tiling), tiling))
            except OutOfResources:
                continue
    packed_gemm.MAX_FUSED_ROWS = fused
    times = sorted([(chosen, None), *times], key=lambda each: each[0])
    label = f"{name} {rows}x{columns}{' gated' if gated else ''}, {num_rows} rows"
    print(f"{label}: cuBLAS {cublas:.1f}, chosen {chosen:.1f} ({size / chosen / 1e3:.0f} GB/s):", flush=True)
    for each, tiling in times[:3]:
        print(f"    {each:7.1f} {tiling or 'as chosen'}", flush=True)
    return chosen, times[0][0]


@click.command()
@click.option(
    "--format", "names", multiple=True, type=click.Choice(list(FORMATS)), default=("Q4_0", "Q4_K", "Q6_K", "Q8_0")
)
@click.option("--rows", multiple=True, type=click.IntRange(1, 1 << 14), default=(1, 16, 64, 256))
@click.option("--seconds", default=60.0, help="Time for measuring, after compiling.")
@click.option("--warm", type=int, help="Compile a part of the variants and end.")
def main(names: tuple[str, ...], rows: tuple[int, ...], seconds: float, warm: int | None) -> None:
    """Check and time."""
    if not torch.cuda.is_available():
        raise click.UsageError("this needs an NVIDIA GPU")
    if warm is not None:
        compile_part(warm, names, rows)
        return
    start = time.monotonic()
    listed = [part for each in rows for part in ("--rows", str(each))] + [
        part for each in names for part in ("--format", each)
    ]
    workers = [subprocess.Popen([sys.executable, __file__, "--warm", str(part), *listed]) for part in range(WORKERS)]
    scratch = SplitKWorkspace(DEVICE)
    right = sum(check(name, scratch) for name in names) == len(names)
    print("compiled:", [worker.wait() for worker in workers], f"{time.monotonic() - start:.0f} s", flush=True)
    print(torch.cuda.get_device_name())
    share = seconds / len(rows) / len(names) / len(SHAPES)
    for num_rows in rows:
        cublas = [measure_cublas(num_rows, shape) for shape in SHAPES]
        for name in names:
            pairs = [measure(name, num_rows, shape, each, share) for shape, each in zip(SHAPES, cublas, strict=True)]
            chosen, best = (LAYERS * sum(each) / 1e3 for each in zip(*pairs, strict=True))
            step = f"{LAYERS * sum(cublas) / 1e3:.2f} ms by cuBLAS, {chosen:.2f} ms as chosen, {best:.2f} ms by the best tilings"
            print(f"== {name}, {num_rows} rows: linear layers of {LAYERS} layers: {step}", flush=True)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
