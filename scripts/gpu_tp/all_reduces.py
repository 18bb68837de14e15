"""All-reduces of every communicator: right first, then timed in CUDA graphs."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from report import Result, report

LINK_BYTES_PER_S = 450e9
"""NVLink 4 of an H100 or H200, one direction."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
HIDDEN = 5120
SIZES = (2048, *(2 * HIDDEN * rows for rows in ROWS), 8 << 20)
"""Bytes of decode batches of a model with hidden size 5,120 in bfloat16, and a smaller and a larger size."""


def all_reduces(tp: int, communicators: list[str]) -> None:
    """Start a process per rank; the first that fails ends all."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(all_reduces_of_rank, (tp, communicators, folder), nprocs=tp)


def all_reduces_of_rank(rank: int, tp: int, communicators: list[str], folder: str) -> None:
    """Check, then time, every variant in turn."""
    import torch

    from minisgl_core.contracts.communicator import CommunicatorSpec

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    for number, (names, provider, tune) in enumerate(variants(communicators)):
        spec = CommunicatorSpec(rank, tp, device, f"file://{folder}/{number}", timeout_s=60)
        if reasons := provider.unsupported(spec):
            if rank == 0:
                report(phase="all-reduce", tp=tp, what=names[0], ok=False, note="; ".join(reasons))
            continue
        started = time.perf_counter()
        group = provider(spec)
        joined_s = time.perf_counter() - started
        for name in names:
            tune(group, name)
            wrong = wrong_sums(group, device)
            times = {} if wrong else {size: microseconds(group, size, device) for size in SIZES}
            if rank == 0:
                note = wrong or f"joined in {joined_s:.1f} s"
                report(phase="all-reduce", tp=tp, what=name, ok=not wrong, note=note, us=times)
        group.close()


def variants(communicators: list[str]) -> Iterator[tuple[list[str], Any, Callable[[Any, str], None]]]:
    """Yield the names of variants, their class, and the function that turns an instance into the variant of a name."""
    from minisgl_core.plugins.registry import Registry

    registry = Registry.from_environment()

    def leave(group: Any, name: str) -> None:
        """Keep the communicator's own selection of kernels."""

    def force(group: Any, name: str) -> None:
        group._one_shot_limit = 4 * group._row_words if name.startswith("one") else 0

    for name in communicators:
        yield [name], registry.load("communicator", name), leave
    if "oneshot" in communicators:
        provider = registry.load("communicator", "oneshot")
        for num_programs in (32, 64, 128):
            variant = type("Variant", (provider,), {"num_programs": num_programs})
            yield [f"one shot, {num_programs}", f"two shots, {num_programs}"], variant, force


def wrong_sums(group: Any, device: Any) -> str:
    """Return the first fault, or an empty text. Run eagerly, one call after another without waiting, then in a CUDA graph."""
    import torch

    def part(rank: int, case: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(1000 * case + rank)
        noise = torch.randn(count, generator=generator, device=device).to(dtype)
        noise[: count // 2 : 3] = -0.0
        return noise

    cases = []
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    for case in range(60):
        count = (16, 64, 1024, 5120, 40_960, 163_840, 1_310_720, 7)[case * 5 % 8]
        mine = part(group.rank, case, count, dtypes[case % 3])
        cases.append((case, count, dtypes[case % 3], group.all_reduce(mine)))
    fixed = torch.zeros(5120, dtype=torch.bfloat16, device=device)
    with captured(lambda: group.all_reduce(fixed.clone()), device) as (graph, outputs):
        for case in range(60, 70):
            fixed.copy_(part(group.rank, case, 5120, torch.bfloat16))
            graph.replay()
            cases.append((case, 5120, torch.bfloat16, outputs[0].clone()))
        torch.cuda.synchronize(device)
    wrong = ""
    for case, count, dtype, total in cases:
        everyones = group.all_gather(total[None], 0)
        expected = sum(part(rank, case, count, dtype).double() for rank in range(group.size))
        eps = torch.finfo(dtype).eps
        close = torch.allclose(total.double(), expected, rtol=4 * eps, atol=16 * eps)
        if not close:
            wrong = wrong or f"case {case}: {count} of {dtype} off by {(total.double() - expected).abs().max():.3g}"
        if not all(torch.equal(one, total) for one in everyones):
            wrong = wrong or f"case {case}: {count} of {dtype}, ranks differ"
    is_wrong = group.all_gather(torch.tensor([float(bool(wrong))], device=device), 0)
    return wrong or ("on another rank" if bool(is_wrong.any()) else "")


@contextmanager
def captured(run: Callable[[], Any], device: Any, times: int = 1) -> Iterator[tuple[Any, list[Any]]]:
    """Give a CUDA graph of some calls, and their results."""
    import torch

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        outputs = [run() for _ in range(times)]
    try:
        yield graph, outputs
    finally:
        torch.cuda.synchronize(device)
        graph.reset()


def microseconds(group: Any, num_bytes: int, device: Any) -> float:
    """Return the time of one all-reduce in place, among 20 in a CUDA graph; the median of 15 replays."""
    import torch

    x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device).normal_()
    times = []
    with captured(lambda: group.all_reduce(x), device, times=20) as (graph, _):
        for _ in range(18):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / 20)
    return round(median(times[3:]), 2)


def latency_table(results: list[Result], tp: int) -> list[str]:
    """Return a table of microseconds by size and variant."""
    columns = [
        result for result in results if result["phase"] == "all-reduce" and result["tp"] == tp and result.get("us")
    ]
    if not columns:
        return []
    lines = [f"all-reduce in a CUDA graph, tp {tp}, microseconds"]
    lines.append("     bytes   floor " + " ".join(f"{column['what'].replace(' ', ''):>13}" for column in columns))
    for size in SIZES:
        floor = 2 * (tp - 1) / tp * size / LINK_BYTES_PER_S * 1e6
        cells = (column["us"].get(size, column["us"].get(str(size))) for column in columns)
        lines.append(f"{size:10,} {floor:7.2f} " + " ".join(f"{cell:13.2f}" for cell in cells))
    return lines
