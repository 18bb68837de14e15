"""Energy per call of kernels on a Hopper GPU, after a check of their results.

    python scripts/kernel_energy.py [--matrix 34816x5120] [--rows 8 --rows 128 --rows 8192] [--decode 240x640] [--heads 40]

A GPU lowers its clock when it would exceed its power limit. If all kernels reach the limit, their duration is their energy
divided by the limit. The script measures reads of memory, decode attention, and the GEMMs of a gated MLP. Each runs for
some seconds until the clock settles, and then for the measurement. It prints microseconds, watts, MHz and millijoules per
call, from NVML's counters.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import mean

import click
import torch

from minisgl_backends.cuda.gated_gemm import HopperGatedGemm
from minisgl_backends.cuda.small_m_gemm import HopperSmallMGemm, StreamKWorkspace
from minisgl_core.contracts.attention import AttentionSpec
from minisgl_core.plugins.registry import Registry
from minisgl_server.bench.attention.cases import Case, spread_lengths
from tune_small_m_gemm import MADE, activated, shape_of, wrong

SETTLE_S, MEASURE_S = 0.4, 1.2
CALLS, REPLAYS = 8, 20
"""Of a graph, and of it between two looks at the clock."""
READ_BYTES = 8 << 30


class Meter:
    """The first GPU's counters (NVML, which the driver brings)."""

    def __init__(self) -> None:
        self._nvml, self._device = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
        self._check(self._nvml.nvmlInit_v2())
        self._check(self._nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self._device)))

    def joules(self) -> float:
        """Return the energy used since the driver was loaded."""
        found = ctypes.c_ulonglong()
        self._check(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(found)))
        return found.value / 1000

    def megahertz(self) -> int:
        """Return the current clock of the SMs."""
        found = ctypes.c_uint()
        self._check(self._nvml.nvmlDeviceGetClockInfo(self._device, 1, ctypes.byref(found)))
        return found.value

    def _check(self, status: int) -> None:
        if status:
            sys.exit(f"NVML says {status}; see nvmlReturn_t in its documentation")


def measure(meter: Meter, name: str, run: Callable[[], object], num_bytes: int, flops: int, calls: int = 1) -> None:
    """Print a line with the cost of `run`, which makes `calls` calls of `num_bytes` and `flops` each."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            run()

    def repeat(seconds: float) -> tuple[int, list[int]]:
        begun, done, clocks = time.perf_counter(), 0, []
        while time.perf_counter() - begun < seconds:
            for _ in range(REPLAYS):
                graph.replay()
            clocks.append(meter.megahertz())
            torch.cuda.synchronize()
            done += REPLAYS * CALLS * calls
        return done, clocks

    repeat(SETTLE_S)
    joules, begun = meter.joules(), time.perf_counter()
    done, clocks = repeat(MEASURE_S)
    seconds, joules = time.perf_counter() - begun, meter.joules() - joules
    each = seconds / done
    print(
        f"{name:36} {each * 1e6:9.1f} us {joules / seconds:5.0f} W {mean(clocks):5.0f} MHz {joules / done * 1e3:9.2f} mJ"
        f" {num_bytes / each / 1e12:6.2f} TB/s {flops / each / 1e12:5.0f} TFLOP/s",
        flush=True,
    )


def measure_reading(meter: Meter) -> None:
    """Measure reads of random and of constant numbers, because bits that change cost energy."""
    numbers = torch.randn(READ_BYTES // 4, device="cuda")
    measure(meter, "sum of float32 random numbers", numbers.sum, READ_BYTES, 0)
    measure(meter, "sum of float32 ones", numbers.fill_(1).sum, READ_BYTES, 0)


def measure_decode(meter: Meter, num_requests: int, length: int, heads: int) -> bool:
    """Measure attention of `num_requests` with 8 KV heads of 128. Return False if the result is wrong."""
    device = torch.device("cuda")
    spec = AttentionSpec(heads, 8, 128, 64, torch.bfloat16, torch.bfloat16, device, 8192, num_requests)
    backend = Registry.from_environment().load("attention", "hopper")
    case = Case(backend, spec, spread_lengths(num_requests, length, 0.6), 1)
    plan = case.backend.plan_capture(case.batch)
    name = f"decode {num_requests}x{length}, {heads} heads"
    outs = case.forward(plan)
    if case.error(outs) > 1:
        print(f"WRONG: {name}", flush=True)
        return False
    measure(meter, name, partial(case.forward, plan), case.num_kv_bytes, int(case.num_flops), calls=len(outs))
    return True


def measure_gemms(meter: Meter, shape: tuple[int, int], all_rows: tuple[int, ...]) -> bool:
    """Gate and up with the activation; False where one is wrong."""
    weight, right = torch.randn(shape, **MADE) / shape[1] ** 0.5, True
    few, many = HopperSmallMGemm(weight, None, StreamKWorkspace(weight.device), gated=True), HopperGatedGemm(weight)
    for rows in all_rows:
        x = torch.randn(rows, shape[1], **MADE)
        own = few if few.supports_input(x) else many
        for kind, gemm in (("own", own), ("cuBLAS", lambda x: activated(x, weight))):
            name = f"{shape[0]}x{shape[1]} gated, {rows} rows, {kind}"
            if reason := wrong(gemm, x, weight, gated=True):
                print(f"WRONG: {name}: {reason}", flush=True)
                right = False
            else:
                measure(meter, name, partial(gemm, x), weight.nbytes, 2 * rows * weight.numel())
    return right


@click.command()
@click.option(
    "--matrix", multiple=True, callback=shape_of, default=("34816x5120",), help="Outputs x inputs, gate above up."
)
@click.option("--rows", multiple=True, type=click.IntRange(1, 16_384), default=(8, 64, 128, 192, 232, 256, 8192))
@click.option(
    "--decode", multiple=True, callback=shape_of, default=("32x900", "128x900", "240x640"), help="Requests x tokens."
)
@click.option(
    "--heads", type=click.Choice([8, 16, 24, 32, 40, 48, 56, 64]), default=40, help="Of queries, for 8 KV heads."
)
def main(matrix: list[tuple[int, int]], rows: tuple[int, ...], decode: list[tuple[int, int]], heads: int) -> None:
    """Check and measure."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise click.UsageError("this needs a Hopper GPU")
    meter = Meter()
    measure_reading(meter)
    right = [measure_decode(meter, *each, heads) for each in decode]
    right += [measure_gemms(meter, shape, rows) for shape in matrix]
    sys.exit(0 if all(right) else 1)


if __name__ == "__main__":
    main()
