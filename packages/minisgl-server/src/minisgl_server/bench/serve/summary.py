"""Summarizes the records of a run."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from minisgl_server.bench.serve.load import Outcome
from minisgl_server.bench.serve.request import Record

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "latency": "end to end",
}
"""Metrics with mean and percentiles: names in JSON, and titles in tables."""


def summarize(
    outcome: Outcome, limits_ms: Mapping[str, float], has_exact_lengths: bool, server_cpu_s: Mapping[str, float]
) -> dict[str, Any]:
    """Return the numbers of a run, by their names in JSON. Times and tokens are those of the completed requests.

    Args:
        limits_ms: limits by metric that a request must keep to count for the goodput.
        has_exact_lengths: outputs must have the requested length.
        server_cpu_s: CPU time of the server's processes by name; empty if it is not known.

    Returns:
        ``errors``: number of failed requests by error message, most frequent first.
        ``num_cached_tokens``, ``hit_rate``: None if the server does not return cached tokens.
        ``has_usage``: the server returned its usage; otherwise, events are counted as tokens.
        ``longest_wait_s``: maximum wait after arrival, for ``--max-concurrency`` or the load generator.
        ``goodput_per_s``: requests per second within every limit; None without limits.
        ``ttft_ms`` and the like: percentiles of a metric; None if it has no values.
        ``frontend_cpu_us_per_token``: CPU time of minisgl's API server and tokenizer workers together.
    """
    completed, seconds = outcome.completed, outcome.seconds
    num_prompt_tokens = sum(record.num_prompt_tokens for record in completed)
    num_output_tokens = sum(record.num_output_tokens for record in completed)
    cached = [record.num_cached_tokens for record in completed if record.num_cached_tokens is not None]
    errors = _grouped([record.error for record in outcome.records if record.error is not None])
    frontend_s = [spent for name, spent in server_cpu_s.items() if name.partition(" ")[0] in ("api", "tokenizer")]

    def per_s(count: float) -> float:
        return count / seconds if seconds else 0.0

    def us_per_token(cpu_s: float) -> float | None:
        return 1e6 * cpu_s / num_output_tokens if num_output_tokens else None

    return {
        "seconds": seconds,
        "num_sent": len(outcome.records),
        "num_completed": len(completed),
        "num_failed": sum(errors.values()),
        "errors": errors,
        "num_interrupted": sum(record.is_interrupted for record in outcome.records),
        "num_unsent": outcome.num_unsent,
        "num_prompt_tokens": num_prompt_tokens,
        "num_cached_tokens": sum(cached) if cached else None,
        "num_output_tokens": num_output_tokens,
        "has_usage": all(record.has_usage for record in completed),
        "num_other_lengths": sum(
            has_exact_lengths and record.num_output_tokens != record.asked_output_tokens for record in completed
        ),
        "num_other_prompts": sum(
            record.asked_prompt_tokens not in (None, record.num_prompt_tokens) for record in completed
        ),
        "peak_concurrency": _peak(outcome.records),
        "longest_wait_s": max((record.wait_s for record in outcome.records), default=0.0),
        "requests_per_s": per_s(len(completed)),
        "input_tokens_per_s": per_s(num_prompt_tokens),
        "output_tokens_per_s": per_s(num_output_tokens),
        "hit_rate": sum(cached) / num_prompt_tokens if cached and num_prompt_tokens else None,
        "goodput_per_s": per_s(sum(_is_good(each, limits_ms) for each in completed)) if limits_ms else None,
        **{f"{name}_ms": _percentiles(values_s(name, completed)) for name in METRICS},
        "client_cpu_s": outcome.client_cpu_s,
        "client_cpu_us_per_token": us_per_token(outcome.client_cpu_s),
        "server_cpu_us_per_token": {name: us_per_token(spent) for name, spent in server_cpu_s.items()},
        "frontend_cpu_us_per_token": us_per_token(sum(frontend_s)) if frontend_s else None,
    }


def values_s(metric: str, records: Iterable[Record]) -> list[float]:
    """Return all values of a metric, in seconds."""
    if metric == "itl":
        return [gap for record in records for gap in record.gaps_s]
    return [value for record in records if (value := getattr(record, f"{metric}_s")) is not None]


def _percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Return mean, percentiles and maximum in milliseconds."""
    if not seconds:
        return None
    values = 1e3 * np.asarray(seconds)
    p50, p90, p99, maximum = np.percentile(values, [50, 90, 99, 100]).tolist()
    return {"mean": float(values.mean()), "p50": p50, "p90": p90, "p99": p99, "max": maximum}


def _grouped(messages: Iterable[str]) -> dict[str, int]:
    """Count messages, with those that differ only in numbers and request ids under the first of them."""
    groups: dict[str, list[str]] = {}
    for message in messages:
        status, _, rest = message.partition(":")
        groups.setdefault(status + re.sub(r"\b[\w-]*\d[\w-]*", "0", rest), []).append(message)
    return {each[0]: len(each) for each in sorted(groups.values(), key=len, reverse=True)}


def _is_good(record: Record, limits_ms: Mapping[str, float]) -> bool:
    return all(1e3 * value <= limit for name, limit in limits_ms.items() for value in values_s(name, [record]))


def _peak(records: Sequence[Record]) -> int:
    changes = [(record.sent_s, 1) for record in records]
    changes += [(record.sent_s + record.latency_s, -1) for record in records]
    return max(itertools.accumulate((change for _, change in sorted(changes)), initial=0))
