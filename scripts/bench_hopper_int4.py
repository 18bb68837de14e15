"""GEMMs with 4-bit weights on a Hopper GPU: times the tilings of cuda/int4_gemm.cu beside bfloat16 cuBLAS.

    python scripts/bench_hopper_int4.py [--rows 1 --rows 256]

Prints the microseconds of one GEMM among many in a CUDA graph, with weights outside of the L2 cache. The matrices are those of
Qwen3-14B, with groups of 128 inputs. tests/backends/ops/test_hopper_int4_gemm.py checks the results.
"""

from __future__ import annotations

from functools import partial

import click
import torch
import torch.nn.functional as F

from minisgl_backends.cuda.gemm_tiling import GemmTiling
from minisgl_backends.cuda.int4_gemm import HopperInt4Gemm, choose_tiling
from minisgl_backends.cuda.small_m_gemm import StreamKWorkspace
from minisgl_backends.kernels.int4_gemm import scale_words
from minisgl_backends.kernels.int4_stages import pack_stages
from minisgl_backends.kernels.int4_weight import Int4Weight
from tune_small_m_gemm import activated, microseconds

SHAPES = ((7168, 5120, False), (5120, 5120, False), (34816, 5120, True), (5120, 17408, False))
"""Qwen3-14B: outputs, inputs, and True for the gated projection."""
LAYERS = 40
COLD_BYTES = 500 << 20
DEVICE = torch.device("cuda")


def random_weight(rows: int, columns: int, *, gated: bool) -> Int4Weight:
    """Return a packed weight of random codes, scales and zero points."""
    weight = Int4Weight.empty(rows, columns, 128, torch.bfloat16, DEVICE, has_zeros=True, gated=gated)
    assert weight.zeros is not None
    weight.codes.random_(-(1 << 15), (1 << 15) - 1)
    weight.zeros.random_(0, 16)
    weight.scales.uniform_(0.5, 1).mul_(0.2 / columns**0.5)
    return weight


def tilings(num_rows: int) -> list[GemmTiling]:
    """Return all tilings for a number of rows."""
    return [GemmTiling(128, cluster=cluster, row_parts=2 if num_rows > 128 else 1) for cluster in (1, 2, 4)]


def measure(num_rows: int, shape: tuple[int, int, bool], workspace: StreamKWorkspace) -> tuple[float, float]:
    """Print a line; return the microseconds of cuBLAS and of the tiling that is chosen."""
    rows, columns, gated = shape
    x = torch.randn(num_rows, columns, device=DEVICE).bfloat16()
    count = max(3, COLD_BYTES // (2 * rows * columns))
    plain = [torch.randn(rows, columns, device=DEVICE).bfloat16() for _ in range(count)]
    cublas = microseconds([partial(activated if gated else F.linear, x, each) for each in plain])
    del plain
    weights = [random_weight(rows, columns, gated=gated) for _ in range(max(3, 2 * COLD_BYTES // (rows * columns)))]
    stages = [pack_stages(each, scale_words(each)) for each in weights]
    num_sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    chosen = choose_tiling(num_rows, len(stages[0]), num_sms)
    times = {}
    for tiling in tilings(num_rows):
        choose = lambda *sizes, tiling=tiling: tiling  # noqa: E731
        gemms = [
            HopperInt4Gemm(weight, each, None, workspace, half=index % 2, choose=choose)
            for index, (weight, each) in enumerate(zip(weights, stages, strict=True))
        ]
        times[tiling] = microseconds([partial(gemm, x) for gemm in gemms])
    speed = stages[0].nbytes / times[chosen] / 1e3
    others = ", ".join(f"cluster {tiling.cluster} {time:.1f}" for tiling, time in times.items() if tiling != chosen)
    name = f"{rows}x{columns}{' gated' if gated else ''}, {num_rows} rows"
    print(f"{name}: cuBLAS {cublas:.1f}, chosen {times[chosen]:.1f} ({speed:.0f} GB/s), {others}", flush=True)
    return cublas, times[chosen]


@click.command()
@click.option("--rows", "all_rows", multiple=True, type=click.IntRange(1, 256), default=(1, 16, 64, 128, 256))
def main(all_rows: tuple[int, ...]) -> None:
    """Time all matrices."""
    if not torch.cuda.is_available():
        raise click.UsageError("this needs an NVIDIA Hopper GPU")
    print(torch.cuda.get_device_name())
    workspace = StreamKWorkspace(DEVICE)
    for num_rows in all_rows:
        pairs = [measure(num_rows, shape, workspace) for shape in SHAPES]
        cublas, own = (LAYERS * sum(each) / 1e3 for each in zip(*pairs, strict=True))
        print(
            f"== {num_rows} rows, linear layers of {LAYERS} layers: cuBLAS {cublas:.2f} ms, own {own:.2f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
