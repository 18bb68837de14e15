"""Results of an offline benchmark."""

from collections.abc import Sequence
from typing import Any

import torch

from minisgl_core.protocol.messages import EngineInfo
from minisgl_server.bench import environment
from minisgl_server.bench.measure import Result

COLUMNS = (
    ("workload", "{workload}"),
    ("engine", "{engine}"),
    ("seconds", "{seconds:.3f}"),
    ("output tok/s", "{output_tokens_per_s:,.1f}"),
    ("total tok/s", "{total_tokens_per_s:,.1f}"),
    ("step ms", "{step_ms:.2f}"),
    ("prefill ms", "{prefill_ms:.2f}"),
)


def notes(results: Sequence[Sequence[Result]]) -> list[str]:
    """Return the notes below the table; the first engine of each group is compared with the others."""
    found = []
    for group in results:
        ours = group[0]
        for other in group[1:]:
            ratio = ours.seconds / other.seconds
            found.append(
                f"{ours.workload.name}: {ours.engine} is {1 / ratio:.2f} times as fast as {other.engine}"
                f" ({ratio:.2f} of its time)"
            )
        cached = max(run.num_cached_tokens for run in ours.runs)
        if cached:
            share = cached / ours.workload.num_prompt_tokens
            found.append(f"{ours.workload.name}: up to {share:.2%} of the prompts' tokens came from the prefix cache")
    return found


def as_json(results: Sequence[Sequence[Result]], info: EngineInfo) -> dict[str, Any]:
    """Return the environment and results of a measurement."""
    return {
        "machine": _machine(info),
        "versions": _versions(),
        "model": {"name": info.model, "architecture": info.architecture, "dtype": info.dtype},
        "choices": {name: {"value": value, "reason": reason} for name, value, reason in info.choices},
        "results": [_as_json(result) for group in results for result in group],
        "comparisons": [
            {
                "workload": group[0].workload.name,
                "with": other.engine,
                "speed_up": other.seconds / group[0].seconds,
                "time_ratio": group[0].seconds / other.seconds,
            }
            for group in results
            for other in group[1:]
        ],
    }


def _as_json(result: Result) -> dict[str, Any]:
    workload = result.workload
    return {
        "workload": workload.name,
        "engine": result.engine,
        "num_seqs": len(workload.prompts),
        "num_prompt_tokens": workload.num_prompt_tokens,
        "num_output_tokens": workload.num_output_tokens,
        "temperature": workload.temperature,
        "seconds": result.seconds,
        "output_tokens_per_s": result.output_tokens_per_s,
        "total_tokens_per_s": result.total_tokens_per_s,
        "step_ms": None if result.step_s is None else 1e3 * result.step_s,
        "prefill_ms": None if result.prefill_s is None else 1e3 * result.prefill_s,
        "runs": [
            {"seconds": run.seconds, "num_steps": run.num_steps, "num_cached_tokens": run.num_cached_tokens}
            for run in result.runs
        ],
    }


def _machine(info: EngineInfo) -> dict[str, Any]:
    found = {**environment.hardware(), "num_threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        found["gpu"], found["num_gpus"] = info.device, torch.cuda.device_count()
    return found


def _versions() -> dict[str, str]:
    return {**environment.versions(), **({"cuda": torch.version.cuda} if torch.version.cuda else {})}


def headline(info: EngineInfo) -> list[str]:
    """Return the lines above the table: model, machine, providers and versions."""
    about, packages = _machine(info), _versions()
    device = f"{about['num_gpus']} x {about['gpu']}, " if "gpu" in about else ""
    threads = f"{about['num_usable_cpus']} CPUs, {about['num_threads']} threads"
    chosen = ", ".join(f"{what} {value}" for what, value, _ in info.choices if what not in ("platform", "dtype"))
    return [
        f"model    {info.model} ({info.architecture}, {info.dtype})",
        f"machine  {device}{about['cpu']}, {threads}, {about['memory_gib']} GiB",
        f"engine   {chosen}",
        f"versions {', '.join(f'{name} {number}' for name, number in packages.items() if name != 'minisgl-server')}",
        "",
    ]
