"""What ``minisgl bench serve`` measured, as tables and as JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from minisgl_server.bench import machine
from minisgl_server.bench.serve.load import Outcome
from minisgl_server.bench.serve.options import Run, ServeOptions
from minisgl_server.bench.serve.request import Record
from minisgl_server.bench.serve.statistics import METRICS, Summary

TITLES = ("run", "sent", "answered", "failed", "seconds", "req/s", "input tok/s", "output tok/s", "hit rate", "at once")
SPREAD_TITLES = ("run", "ms", "mean", "p50", "p90", "p99", "max")
BUSY_SHARE = 0.8
"""Of a core: from here on, the load generator may be what is measured."""
_NO_ENDPOINT = r"^HTTP (404(?!.*\bmodel\b)|405|501)\b"
_OTHER_ENDPOINT = {
    "chat": re.compile(rf"{_NO_ENDPOINT}|chat model|chat/completions|not support (the )?completions", re.IGNORECASE),
    "completions": re.compile(rf"{_NO_ENDPOINT}|chat.?template|not support (the )?chat", re.IGNORECASE),
}
"""Failures after which the endpoint of this name is worth a try, in the words of OpenAI, vLLM and this server."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: what was asked for, what came, and that in numbers."""

    run: Run
    outcome: Outcome
    summary: Summary


def headline(options: ServeOptions, model: str, workload: str) -> list[str]:
    """What was measured, before the tables."""
    exact = ", answers go on to that length" if options.ignore_eos else ""
    return [
        f"server   {options.url}, {model}, {options.endpoint}",
        f"workload {workload}{exact}; seed {options.seed}",
        "",
    ]


def row(measured: Measured) -> tuple[str, ...]:
    """Under `TITLES`."""
    found = measured.summary
    return (
        measured.run.label,
        str(found.num_sent),
        str(found.num_answered),
        str(found.num_failed),
        f"{found.seconds:.2f}",
        f"{found.per_s(found.num_answered):.2f}",
        f"{found.per_s(found.num_prompt_tokens):,.1f}",
        f"{found.per_s(found.num_output_tokens):,.1f}",
        "n/a" if found.hit_rate is None else f"{found.hit_rate:.1%}",
        str(found.peak_concurrency),
    )


def spread_rows(measured: Sequence[Measured]) -> list[tuple[str, ...]]:
    """Under `SPREAD_TITLES`."""
    found = []
    for each in measured:
        for name, title in METRICS.items():
            spread = each.summary.spreads[name]
            values = ["n/a"] * 5 if spread is None else [f"{value:.2f}" for value in asdict(spread).values()]
            found.append((each.run.label, title, *values))
    return found


def notes(measured: Sequence[Measured], endpoint: str) -> list[str]:
    """Sentences that follow the tables, with a remedy where the server has only the other endpoint."""
    said = [f"{each.run.label}: {text}" for each in measured for text in _notes(each.run, each.summary)]
    other = "completions" if endpoint == "chat" else "chat"
    if any(_OTHER_ENDPOINT[other].search(error) for each in measured for error in each.summary.errors):
        said.append(f"The server or its model does not serve --endpoint {endpoint}; try --endpoint {other}.")
    return said


def _notes(run: Run, found: Summary) -> list[str]:
    said = [f"failed: {count} x {error}" for error, count in found.errors.items()]
    if found.num_unsent:
        said.append(f"{found.num_unsent} later turns were not sent, as the one before had failed")
    if found.num_interrupted:
        said.append(f"{found.num_interrupted} were interrupted")
    if found.goodput_per_s is not None:
        said.append(f"{found.goodput_per_s:.2f} requests/s kept the limits of --goodput")
    if found.num_answered and not found.is_counted:
        said.append("the server does not count its tokens: the output's are the stream's events")
    if found.num_other_lengths:
        said.append(f"{found.num_other_lengths} answers are not of the length asked for")
    if found.num_other_prompts:
        said.append(f"{found.num_other_prompts} prompts have more or fewer tokens to the server than asked for")
    if run.max_concurrency is None and found.longest_wait_s > 0.1 and not math.isinf(run.request_rate):
        said.append(f"requests were sent up to {1e3 * found.longest_wait_s:.0f} ms late")
    busy = found.per_s(found.client_cpu_s)
    if (client := found.us_per_token(found.client_cpu_s)) is not None:
        said.append(f"the load generator took {client:.1f} us of CPU time a token, {busy:.0%} of a core")
    if busy > BUSY_SHARE:
        said.append("the load generator was busy: what is measured may be itself")
    parts = {name: found.us_per_token(seconds) for name, seconds in found.server_cpu_s.items()}
    shown = ", ".join(f"{name} {value:.1f}" for name, value in parts.items() if value is not None and value >= 0.05)
    if shown:
        said.append(f"the server took, in us of CPU time a token: {shown}")
    if (serving := found.serving_us_per_token) is not None:
        said.append(f"its API server and tokenizer workers together: {serving:.1f} us of CPU time a token")
    return said


def as_json(
    options: ServeOptions, model: str, started: str, workload: str, measured: Sequence[Measured]
) -> dict[str, Any]:
    """Everything that is known of the measurement, but for the key; times in the units that the names say."""
    settings = {name: value for name, value in asdict(options).items() if name != "api_key"}
    return {
        "started": started,
        "machine": machine.machine(),
        "versions": machine.versions(),
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
        **{name: value for name, value in asdict(found).items() if name not in ("spreads", "server_cpu_s")},
        "num_failed": found.num_failed,
        "requests_per_s": found.per_s(found.num_answered),
        "input_tokens_per_s": found.per_s(found.num_prompt_tokens),
        "output_tokens_per_s": found.per_s(found.num_output_tokens),
        "hit_rate": found.hit_rate,
        **{f"{name}_ms": None if spread is None else asdict(spread) for name, spread in found.spreads.items()},
        "client_cpu_us_per_token": found.us_per_token(found.client_cpu_s),
        "server_cpu_us_per_token": {name: found.us_per_token(each) for name, each in found.server_cpu_s.items()},
        "serving_cpu_us_per_token": found.serving_us_per_token,
    }
    if with_details:
        values["requests"] = [_record_json(record) for record in measured.outcome.records]
    return _plain(values)


def _record_json(record: Record) -> dict[str, Any]:
    return {name: getattr(record, name) for name in Record.__slots__ if name != "gaps_s"}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: the word, as the flags take it."""
    return {name: _word(value) for name, value in values.items()}


def _word(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_word(each) for each in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value
