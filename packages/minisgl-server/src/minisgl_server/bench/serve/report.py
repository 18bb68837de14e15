"""Results of ``minisgl bench serve``, as tables and as JSON."""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

from minisgl_server.bench.serve.load import Outcome
from minisgl_server.bench.serve.options import Run
from minisgl_server.bench.serve.request import Record
from minisgl_server.bench.serve.summary import METRICS, Summary

COLUMNS = (
    ("run", "{label}"),
    ("sent", "{num_sent}"),
    ("completed", "{num_completed}"),
    ("failed", "{num_failed}"),
    ("seconds", "{seconds:.2f}"),
    ("req/s", "{requests_per_s:.2f}"),
    ("input tok/s", "{input_tokens_per_s:,.1f}"),
    ("output tok/s", "{output_tokens_per_s:,.1f}"),
    ("hit rate", "{hit_rate:.1%}"),
    ("peak concurrency", "{peak_concurrency}"),
)
PERCENTILE_TITLES = ("run", "ms", "mean", "p50", "p90", "p99", "max")
BUSY_FRACTION = 0.8
"""CPU load of the load generator, in cores, above which it may limit the measurement."""
_NO_ENDPOINT = r"^HTTP (404(?!.*\bmodel\b)|405|501)\b"
_OTHER_ENDPOINT = {
    "chat": re.compile(rf"{_NO_ENDPOINT}|chat model|chat/completions|not support (the )?completions", re.IGNORECASE),
    "completions": re.compile(rf"{_NO_ENDPOINT}|chat.?template|not support (the )?chat", re.IGNORECASE),
}
"""Patterns of OpenAI's, vLLM's and this server's errors that suggest to try the endpoint of this name instead."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Parameters, records and summary of one run."""

    run: Run
    outcome: Outcome
    summary: Summary


def headline(options: SimpleNamespace, model: str, workload: str) -> list[str]:
    """Return the lines above the tables: server and workload."""
    exact = ", exactly that long" if options.ignore_eos else ""
    return [
        f"server   {options.url}, {model}, {options.endpoint}",
        f"workload {workload}{exact}; seed {options.seed}",
        "",
    ]


def percentile_rows(measured: Sequence[Measured]) -> list[tuple[str, ...]]:
    """Return the rows of the table with `PERCENTILE_TITLES`."""
    found = []
    for each in measured:
        for name, title in METRICS.items():
            percentiles = each.summary.percentiles[name]
            values = ["n/a"] * 5 if percentiles is None else [f"{value:.2f}" for value in asdict(percentiles).values()]
            found.append((each.run.label, title, *values))
    return found


def notes(measured: Sequence[Measured], endpoint: str) -> list[str]:
    """Return the notes below the tables, with a remedy if the server supports only the other endpoint."""
    lines = [f"{each.run.label}: {text}" for each in measured for text in _notes(each.run, each.summary)]
    other = "completions" if endpoint == "chat" else "chat"
    if any(_OTHER_ENDPOINT[other].search(error) for each in measured for error in each.summary.errors):
        lines.append(f"The server or its model does not support --endpoint {endpoint}; try --endpoint {other}.")
    return lines


def _notes(run: Run, found: Summary) -> list[str]:
    lines = [f"failed: {count} x {error}" for error, count in found.errors.items()]
    if found.num_unsent:
        lines.append(f"{found.num_unsent} later turns were not sent, as the previous turn had failed")
    if found.num_interrupted:
        lines.append(f"{found.num_interrupted} requests were interrupted")
    if found.goodput_per_s is not None:
        lines.append(f"{found.goodput_per_s:.2f} requests/s were within the limits of --goodput")
    if found.num_completed and not found.has_usage:
        lines.append("the server returns no usage: stream events are counted as output tokens")
    if found.num_other_lengths:
        lines.append(f"{found.num_other_lengths} outputs do not have the requested length")
    if found.num_other_prompts:
        lines.append(f"{found.num_other_prompts} prompts have more or fewer tokens on the server than requested")
    if run.max_concurrency is None and found.longest_wait_s > 0.1 and not math.isinf(run.request_rate):
        lines.append(f"requests were sent up to {1e3 * found.longest_wait_s:.0f} ms late")
    busy = found.per_s(found.client_cpu_s)
    if (client := found.us_per_token(found.client_cpu_s)) is not None:
        lines.append(f"the load generator took {client:.1f} us of CPU time per token, {busy:.0%} of a core")
    if busy > BUSY_FRACTION:
        lines.append("the load generator was busy: it may have limited the measurement")
    parts = {name: found.us_per_token(seconds) for name, seconds in found.server_cpu_s.items()}
    shown = ", ".join(f"{name} {value:.1f}" for name, value in parts.items() if value is not None and value >= 0.05)
    if shown:
        lines.append(f"the server took, in us of CPU time per token: {shown}")
    if (frontend := found.frontend_cpu_us_per_token) is not None:
        lines.append(f"its API server and tokenizer workers together: {frontend:.1f} us of CPU time per token")
    return lines


def as_json(options: SimpleNamespace, model: str, workload: str, measured: Sequence[Measured]) -> dict[str, Any]:
    """Return the options without the API key, and the results of a measurement."""
    settings = {name: value for name, value in vars(options).items() if name != "api_key"}
    return {
        "model": model,
        "workload": workload,
        "options": _plain(settings | {"model": model}),
        "runs": [_run_json(each, options.details) for each in measured],
    }


def _run_json(measured: Measured, with_details: bool) -> dict[str, Any]:
    run, found = measured.run, measured.summary
    values = {
        "label": run.label,
        "request_rate": run.request_rate,
        "max_concurrency": run.max_concurrency,
        "time_scale": run.time_scale,
        "is_interrupted": measured.outcome.is_interrupted,
        **{name: value for name, value in asdict(found).items() if name not in ("percentiles", "server_cpu_s")},
        "num_failed": found.num_failed,
        "requests_per_s": found.per_s(found.num_completed),
        "input_tokens_per_s": found.per_s(found.num_prompt_tokens),
        "output_tokens_per_s": found.per_s(found.num_output_tokens),
        "hit_rate": found.hit_rate,
        **{f"{name}_ms": None if each is None else asdict(each) for name, each in found.percentiles.items()},
        "client_cpu_us_per_token": found.us_per_token(found.client_cpu_s),
        "server_cpu_us_per_token": {name: found.us_per_token(each) for name, each in found.server_cpu_s.items()},
        "frontend_cpu_us_per_token": found.frontend_cpu_us_per_token,
    }
    if with_details:
        values["requests"] = [_record_json(record) for record in measured.outcome.records]
    plain: dict[str, Any] = _plain(values)
    return plain


def _record_json(record: Record) -> dict[str, Any]:
    return {name: getattr(record, name) for name in Record.__slots__ if name != "gaps_s"}


def _plain(value: Any) -> Any:
    """Return a value with infinities as the text ``inf``, as JSON has none and the flags accept it."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value
