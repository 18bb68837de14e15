"""Runs ``minisgl bench attention``, from its options to the report."""

import itertools
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import click
import torch

from minisgl_core.contracts.attention import AttentionSpec
from minisgl_core.errors import InvalidValueError, PluginError
from minisgl_core.plugins.registry import Registry
from minisgl_core.utils.fp8 import FP8
from minisgl_core.utils.host_memory import available_memory
from minisgl_core.utils.progress import progress_bar
from minisgl_server.bench.attention.cases import MIN_MAX_SEQ_LEN, NUM_LAYERS, Case, spread_lengths, time_case
from minisgl_server.bench.environment import hardware, print_results, write_json

COLUMNS = (
    ("provider", "{provider}"),
    ("page", "{page_size}"),
    ("step", "{step}"),
    ("ms", "{ms:.3f}"),
    ("GB/s", "{gb_per_s:,.1f}"),
    ("TFLOP/s", "{tflop_per_s:.3f}"),
    ("plan us", "{plan_us:.0f}"),
    ("error", "{verdict}"),
)
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


def run_attention(options: SimpleNamespace) -> None:
    """Measure, print a table, and write the JSON file if one is given. Exit with status 1 if a provider's output is wrong.

    In `options`, the command's flags, None and () are replaced by the defaults of the device.
    """
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidValueError("--device", "cuda", "a device of this machine, which has no GPU that torch can use")
    defaults = GPU_DEFAULTS if device.type == "cuda" else CPU_DEFAULTS
    if options.decodes or options.prefills:
        defaults = {**defaults, "decodes": (), "prefills": ()}
    for name, value in {**defaults, "device": device.type}.items():
        setattr(options, name, getattr(options, name) or value)
    name = torch.cuda.get_device_name() if device.type == "cuda" else str(hardware()["cpu"])
    heads = f"{options.num_q_heads} query and {options.num_kv_heads} KV heads of {options.head_dim}"
    click.echo(f"{name}, {heads}, {options.dtype}\n")
    with torch.inference_mode():
        rows = _measure(options, device)
    shown, skipped = [], defaultdict(set)
    for row in rows:
        if "reason" in row:
            skipped[row["provider"], row["reason"]].add(row["page_size"])
        else:
            shown.append(row | {"verdict": "WRONG" if row["is_wrong"] else f"{row['error']:.0%} of tolerance"})
    print_results(COLUMNS, shown)
    for (provider, reason), sizes in skipped.items():
        click.echo(f"not measured: {provider}, pages of {', '.join(map(str, sorted(sizes)))}: {reason}")
    if any(row["is_graph"] for row in shown):
        click.echo("Decodes were replayed from CUDA graphs if the provider supports them.")
    write_json(options.json_file, device=name, options=vars(options), results=rows)
    if wrong := sorted({row["provider"] for row in shown if row["is_wrong"]}):
        click.echo(f"Wrong output: {', '.join(wrong)}", err=True)
        sys.exit(1)


def _measure(options: SimpleNamespace, device: torch.device) -> list[dict[str, Any]]:
    """Return a row per provider, page size and step, with the measurement or the reason why there is none."""
    registry = Registry.from_environment()
    for name in options.providers:
        registry.load("attention", name)  # a wrong name ends the command before the first measurement
    steps = [("decode", *shape) for shape in options.decodes] + [("prefill", *shape) for shape in options.prefills]
    names = options.providers or registry.names("attention")
    cases = list(itertools.product(names, options.page_sizes, steps))
    rows: list[dict[str, Any]] = []
    with progress_bar() as bar:
        task = bar.add_task("", total=len(cases))
        for name, page_size, (kind, batch, length) in bar.track(cases, task_id=task):
            step = f"{kind} {batch}x{length}"
            bar.update(task, description=f"{name}, pages of {page_size}, {step}")
            row = {"provider": name, "page_size": page_size, "step": step}
            if _host_bytes(options, page_size, kind, batch, length) > available_memory():
                rows.append(row | {"reason": "it does not fit in the host's memory"})
                continue
            lengths = [length] * batch if kind == "prefill" else spread_lengths(batch, length, options.spread)
            spec = _spec(options, device, page_size, lengths)
            try:
                result = _measure_case(registry, name, spec, lengths, None if kind == "prefill" else 1, options.repeats)
            except PluginError as error:
                if options.providers:
                    raise
                result = {"reason": str(error)}
            rows.append(row | result)
    return rows


def _host_bytes(options: SimpleNamespace, page_size: int, kind: str, batch: int, length: int) -> int:
    """Return about how much memory of the host a step needs: lists of requests, scores of the reference, K and V."""
    scores: int = 3 * 8 * length * (length if kind == "prefill" else 1)
    if options.device != "cpu":
        return 100 * batch + scores
    itemsize = 1 if options.kv_dtype == "fp8" else getattr(torch, options.dtype).itemsize
    tokens = batch * -(-length // page_size) * page_size
    kv: int = NUM_LAYERS * 2 * tokens * options.num_kv_heads * options.head_dim * itemsize
    return 100 * batch + scores + kv


def _spec(options: SimpleNamespace, device: torch.device, page_size: int, lengths: list[int]) -> AttentionSpec:
    dtype = getattr(torch, options.dtype)
    return AttentionSpec(
        num_q_heads=options.num_q_heads,
        num_kv_heads=options.num_kv_heads,
        head_dim=options.head_dim,
        page_size=page_size,
        dtype=dtype,
        kv_dtype=FP8 if options.kv_dtype == "fp8" else dtype,
        device=device,
        max_seq_len=max(MIN_MAX_SEQ_LEN, *lengths),
        max_batch=len(lengths),
    )


def _measure_case(
    registry: Registry, name: str, spec: AttentionSpec, lengths: list[int], num_new: int | None, repeats: int
) -> dict[str, Any]:
    if reasons := registry.unsupported("attention", name, spec):
        return {"reason": "; ".join(reasons)}
    try:
        case = Case(registry.load("attention", name), spec, lengths, num_new)
        timing = time_case(case, repeats)
    except torch.OutOfMemoryError:
        return {"reason": "it does not fit in the device's memory"}
    return {
        **timing,
        "gb_per_s": case.num_kv_bytes / timing["ms"] / 1e6,
        "tflop_per_s": case.num_flops / timing["ms"] / 1e9,
        "is_wrong": not timing["error"] <= 1,
    }
