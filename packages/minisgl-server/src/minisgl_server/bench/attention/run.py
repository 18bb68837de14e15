"""Runs ``minisgl bench attention``, from its options to the report."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import torch

from minisgl_core.cli.table import print_table
from minisgl_core.contracts.attention import AttentionBackend, AttentionSpec
from minisgl_core.errors import InvalidValueError, PluginError
from minisgl_core.plugins.registry import Entry, Registry, reasons_of
from minisgl_core.utils.fp8 import FP8
from minisgl_core.utils.progress import progress_bar
from minisgl_server.bench import environment
from minisgl_server.bench.attention.cases import MIN_MAX_SEQ_LEN, Case, spread_lengths
from minisgl_server.bench.attention.options import AttentionOptions, Shape
from minisgl_server.bench.attention.timing import Timing, time_case

TITLES = ("provider", "page", "step", "ms", "GB/s", "TFLOP/s", "plan us", "error")
GPU_DEFAULTS: dict[str, Any] = {
    "dtype": "bfloat16",
    "page_sizes": (1, 16, 64, 128),
    "decodes": ((256, 1064),),
    "prefills": ((16, 1024),),
}
CPU_DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "page_sizes": (1, 16),
    "decodes": ((8, 256),),
    "prefills": ((1, 256),),
}


@dataclass(frozen=True, slots=True)
class Row:
    """Result of one provider on one step: a timing, or the reason why there is none.

    Attributes:
        provider: name of the provider.
        page_size: tokens per page.
        step: description of the step.
        timing: the measurement.
        num_bytes: bytes of K and V.
        num_flops: FLOPs of the step.
        reason: reason why it was not measured.
    """

    provider: str
    page_size: int
    step: str
    timing: Timing | None = None
    num_bytes: int = 0
    num_flops: float = 0.0
    reason: str = ""

    @property
    def is_wrong(self) -> bool:
        """True if the error of the output exceeds the tolerance of the dtype."""
        return self.timing is not None and not self.timing.error <= 1


def run_attention(options: AttentionOptions) -> None:
    """Measure, print a table, and write the JSON file if one is given. Exit with status 1 if a provider's output is wrong.

    Raises:
        InvalidValueError: the device does not exist.
        PluginError: a provider that was given by name cannot be loaded.
    """
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidValueError("--device", "cuda", "a device of this machine, which has no GPU that torch can use")
    defaults = GPU_DEFAULTS if device.type == "cuda" else CPU_DEFAULTS
    missing = {name: value for name, value in defaults.items() if not getattr(options, name)}
    if options.decodes or options.prefills:
        missing = {name: value for name, value in missing.items() if name not in ("decodes", "prefills")}
    options = replace(options, device=device.type, **missing)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    name = torch.cuda.get_device_name() if device.type == "cuda" else str(environment.hardware()["cpu"])
    heads = f"{options.num_q_heads} query and {options.num_kv_heads} KV heads of {options.head_dim}"
    click.echo(f"{name}, {heads}, {options.dtype}\n")
    with torch.inference_mode():
        rows = _measure(options, device)
    print_table(TITLES, [_cells(row, row.timing) for row in rows if row.timing is not None])
    for note in _reasons(rows):
        click.echo(note)
    if any(row.timing is not None and row.timing.is_graph for row in rows):
        click.echo("Decodes were replayed from CUDA graphs if the provider supports them.")
    if options.json_file:
        found = {
            "started": started,
            "device": name,
            "machine": environment.hardware(),
            "versions": environment.versions(),
            "options": asdict(options),
            "results": [_json(row) for row in rows],
        }
        Path(options.json_file).write_text(json.dumps(found, indent=2) + "\n")
    if wrong := sorted({row.provider for row in rows if row.is_wrong}):
        click.echo(f"Wrong output: {', '.join(wrong)}", err=True)
        sys.exit(1)


def _measure(options: AttentionOptions, device: torch.device) -> list[Row]:
    registry = Registry.from_environment()
    providers = list(_providers(registry, options.providers))
    steps = [(shape, 1) for shape in options.decodes] + [(shape, None) for shape in options.prefills]
    rows: list[Row] = []
    with progress_bar() as bar:
        task = bar.add_task("", total=len(providers) * len(options.page_sizes) * len(steps))
        for name, provider in providers:
            for page_size in options.page_sizes:
                for shape, num_new in steps:
                    description = f"{'decode' if num_new else 'prefill'} {shape[0]}x{shape[1]}"
                    bar.update(task, description=f"{name}, pages of {page_size}, {description}")
                    if isinstance(provider, str):
                        rows.append(Row(name, page_size, description, reason=provider))
                    else:
                        entry = registry.entry("attention", name)
                        rows.append(
                            _measure_case(options, device, entry, provider, page_size, shape, num_new, description)
                        )
                    bar.advance(task)
    return rows


def _measure_case(
    options: AttentionOptions,
    device: torch.device,
    entry: Entry,
    provider: type[AttentionBackend],
    page_size: int,
    shape: Shape,
    num_new: int | None,
    description: str,
) -> Row:
    batch, length = shape
    lengths = [length] * batch if num_new is None else spread_lengths(batch, length, options.spread)
    dtype = getattr(torch, str(options.dtype))
    spec = AttentionSpec(
        num_q_heads=options.num_q_heads,
        num_kv_heads=options.num_kv_heads,
        head_dim=options.head_dim,
        page_size=page_size,
        dtype=dtype,
        kv_dtype=FP8 if options.kv_dtype == "fp8" else dtype,
        device=device,
        max_seq_len=max(MIN_MAX_SEQ_LEN, *lengths),
        max_batch=batch,
    )
    try:
        reasons = reasons_of(entry, provider, spec)
    except PluginError as error:
        if options.providers:
            raise
        reasons = [str(error)]
    if reasons:
        return Row(entry.name, page_size, description, reason="; ".join(reasons))
    try:
        case = Case(provider, spec, lengths, num_new)
        timing = time_case(case, options.repeats)
    except torch.OutOfMemoryError:
        return Row(entry.name, page_size, description, reason="it does not fit in the device's memory")
    return Row(entry.name, page_size, description, timing, case.num_kv_bytes, case.num_flops)


def _providers(registry: Registry, names: tuple[str, ...]) -> Iterator[tuple[str, type[AttentionBackend] | str]]:
    """Yield the loaded providers; one that was not given by name and cannot be loaded has the reason instead."""
    for name in names or registry.names("attention"):
        try:
            yield name, registry.load("attention", name)
        except PluginError as error:
            if names:
                raise
            yield name, str(error)


def _cells(row: Row, timing: Timing) -> tuple[str, ...]:
    return (
        row.provider,
        str(row.page_size),
        row.step,
        f"{1e3 * timing.seconds:.3f}",
        f"{row.num_bytes / timing.seconds / 1e9:,.1f}",
        f"{row.num_flops / timing.seconds / 1e12:.3f}",
        f"{1e6 * timing.plan_s:.0f}",
        "WRONG" if row.is_wrong else f"{timing.error:.0%} of tolerance",
    )


def _reasons(rows: list[Row]) -> list[str]:
    """Return the cases that were not measured, grouped by reason."""
    pages: dict[tuple[str, str], set[int]] = {}
    for row in rows:
        if row.reason:
            pages.setdefault((row.provider, row.reason), set()).add(row.page_size)
    return [
        f"not measured: {provider}, pages of {', '.join(map(str, sorted(sizes)))}: {reason}"
        for (provider, reason), sizes in pages.items()
    ]


def _json(row: Row) -> dict[str, Any]:
    common = {"provider": row.provider, "page_size": row.page_size, "step": row.step}
    if row.timing is None:
        return {**common, "reason": row.reason}
    timing = row.timing
    return {
        **common,
        "ms": 1e3 * timing.seconds,
        "gb_per_s": row.num_bytes / timing.seconds / 1e9,
        "tflop_per_s": row.num_flops / timing.seconds / 1e12,
        "plan_us": 1e6 * timing.plan_s,
        "error": timing.error,
        "is_wrong": row.is_wrong,
        "is_graph": timing.is_graph,
    }
