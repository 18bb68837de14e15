"""Results of ``minisgl bench serve``, as tables and as JSON."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import click

from minisgl_server.bench.environment import print_results
from minisgl_server.bench.serve.load import Outcome
from minisgl_server.bench.serve.options import Run
from minisgl_server.bench.serve.request import Record
from minisgl_server.bench.serve.summary import METRICS

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
PERCENTILES = ("mean", "p50", "p90", "p99", "max")
PERCENTILE_COLUMNS = (("run", "{label}"), ("ms", "{metric}"), *((name, f"{{{name}:.2f}}") for name in PERCENTILES))
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
    """Parameters and records of one run, and its summary by `summarize`."""

    run: Run
    outcome: Outcome
    summary: dict[str, Any]


def print_report(options: SimpleNamespace, model: str, workload: str, measured: Sequence[Measured]) -> None:
    """Print server and workload, the tables, and the notes below them."""
    exact = ", exactly that long" if options.ignore_eos else ""
    click.echo(f"server   {options.url}, {model}, {options.endpoint}")
    click.echo(f"workload {workload}{exact}; seed {options.seed}\n")
    print_results(COLUMNS, [each.summary | {"label": each.run.label} for each in measured])
    click.echo()
    percentiles = [
        {"label": each.run.label, "metric": title, **(each.summary[f"{name}_ms"] or dict.fromkeys(PERCENTILES))}
        for each in measured
        for name, title in METRICS.items()
    ]
    print_results(PERCENTILE_COLUMNS, percentiles)
    for each in measured:
        for text in _notes(each.run, each.summary):
            click.echo(f"{each.run.label}: {text}")
    other = "completions" if options.endpoint == "chat" else "chat"
    if any(_OTHER_ENDPOINT[other].search(error) for each in measured for error in each.summary["errors"]):
        click.echo(f"The server or its model does not support --endpoint {options.endpoint}; try --endpoint {other}.")


def _notes(run: Run, summary: dict[str, Any]) -> Iterator[str]:
    """Yield what a reader of the tables has to know of a run, such as errors and limits of the measurement."""
    for error, count in summary["errors"].items():
        yield f"failed: {count} x {error}"
    if summary["num_unsent"]:
        yield f"{summary['num_unsent']} later turns were not sent, as the previous turn had failed"
    if summary["num_interrupted"]:
        yield f"{summary['num_interrupted']} requests were interrupted"
    if summary["goodput_per_s"] is not None:
        yield f"{summary['goodput_per_s']:.2f} requests/s were within the limits of --goodput"
    if summary["num_completed"] and not summary["has_usage"]:
        yield "the server returns no usage: stream events are counted as output tokens"
    if summary["num_other_lengths"]:
        yield f"{summary['num_other_lengths']} outputs do not have the requested length"
    if summary["num_other_prompts"]:
        yield f"{summary['num_other_prompts']} prompts have more or fewer tokens on the server than requested"
    wait_s = summary["longest_wait_s"]
    if run.max_concurrency is None and wait_s > 0.1 and not math.isinf(run.request_rate):
        yield f"requests were sent up to {1e3 * wait_s:.0f} ms late"
    busy = summary["client_cpu_s"] / summary["seconds"] if summary["seconds"] else 0.0
    if (client := summary["client_cpu_us_per_token"]) is not None:
        yield f"the load generator took {client:.1f} us of CPU time per token, {busy:.0%} of a core"
    if busy > BUSY_FRACTION:
        yield "the load generator was busy: it may have limited the measurement"
    parts = {name: value for name, value in summary["server_cpu_us_per_token"].items() if (value or 0) >= 0.05}
    if parts:
        shown = ", ".join(f"{name} {value:.1f}" for name, value in parts.items())
        yield f"the server took, in us of CPU time per token: {shown}"
    if (frontend := summary["frontend_cpu_us_per_token"]) is not None:
        yield f"its API server and tokenizer workers together: {frontend:.1f} us of CPU time per token"


def as_json(options: SimpleNamespace, model: str, workload: str, measured: Sequence[Measured]) -> dict[str, Any]:
    """Return the options without the API key, and the results. Infinities and NaN, which JSON lacks, become strings."""
    settings = {name: value for name, value in vars(options).items() if name != "api_key"} | {"model": model}
    runs = [_run_json(each, options.details) for each in measured]
    text = json.dumps({"model": model, "workload": workload, "options": settings, "runs": runs})
    plain: dict[str, Any] = json.loads(text, parse_constant=lambda constant: str(float(constant)))
    return plain


def _run_json(measured: Measured, with_details: bool) -> dict[str, Any]:
    parameters = ("label", "request_rate", "max_concurrency", "time_scale")
    result = {name: getattr(measured.run, name) for name in parameters}
    result |= {"is_interrupted": measured.outcome.is_interrupted, **measured.summary}
    if with_details:
        names = [name for name in Record.__slots__ if name != "gaps_s"]
        result["requests"] = [{name: getattr(each, name) for name in names} for each in measured.outcome.records]
    return result
