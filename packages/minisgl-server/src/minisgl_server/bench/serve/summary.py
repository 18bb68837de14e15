"""Summarizes the records of a run."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from minisgl_server.bench.serve.cpu import frontend_cpu_s
from minisgl_server.bench.serve.load import Outcome
from minisgl_server.bench.serve.request import Record

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "latency": "end to end",
}
"""Metrics with mean and percentiles: names in JSON, and titles in tables."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Mean, percentiles and maximum of a metric, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Percentiles | None":
        """Return the percentiles of times in seconds; None if there are none."""
        if not len(seconds):
            return None
        values = 1e3 * np.asarray(seconds)
        p50, p90, p99 = map(float, np.percentile(values, [50, 90, 99]))
        return cls(float(values.mean()), p50, p90, p99, float(values.max()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Summary of a run. Times and tokens are those of the completed requests.

    Attributes:
        seconds: time from the start to the last event.
        num_completed: number of requests with a complete response.
        errors: number of failed requests by error message, most frequent first; messages that differ only in numbers are one.
        num_interrupted: number of requests that ran when the user interrupted the run.
        num_unsent: number of turns that were not sent, as an earlier one failed.
        num_cached_tokens: prompt tokens from the prefix cache; None if the server does not return them.
        has_usage: the server returned its usage; otherwise, events are counted as tokens.
        num_other_lengths: number of outputs without the requested length.
        num_other_prompts: number of prompts with a different length on the server.
        longest_wait_s: maximum wait after arrival, for ``--max-concurrency`` or the load generator.
        goodput_per_s: requests per second within every limit; None without limits.
        client_cpu_s: CPU time of the load generator.
        server_cpu_s: CPU time of the server's processes by name; empty if it is not known.
    """

    seconds: float
    num_sent: int
    num_completed: int
    errors: dict[str, int]
    num_interrupted: int
    num_unsent: int
    num_prompt_tokens: int
    num_cached_tokens: int | None
    num_output_tokens: int
    has_usage: bool
    num_other_lengths: int
    num_other_prompts: int
    peak_concurrency: int
    longest_wait_s: float
    percentiles: dict[str, Percentiles | None]
    goodput_per_s: float | None
    client_cpu_s: float
    server_cpu_s: dict[str, float]

    @property
    def num_failed(self) -> int:
        return sum(self.errors.values())

    @property
    def hit_rate(self) -> float | None:
        """Fraction of the prompt tokens that came from the prefix cache."""
        if self.num_cached_tokens is None or not self.num_prompt_tokens:
            return None
        return self.num_cached_tokens / self.num_prompt_tokens

    def per_s(self, count: float) -> float:
        """Return a count per second of the run."""
        return count / self.seconds if self.seconds else 0.0

    def us_per_token(self, seconds: float) -> float | None:
        """Return microseconds per output token; None without output tokens."""
        return 1e6 * seconds / self.num_output_tokens if self.num_output_tokens else None

    @property
    def frontend_cpu_us_per_token(self) -> float | None:
        """CPU time per output token of minisgl's API server and tokenizer workers together."""
        found = frontend_cpu_s(self.server_cpu_s)
        return None if found is None else self.us_per_token(found)


def summarize(
    outcome: Outcome, limits_ms: Mapping[str, float], has_exact_lengths: bool, server_cpu_s: dict[str, float]
) -> Summary:
    """Summarize a run.

    Args:
        limits_ms: limits by metric that a request must keep to count for the goodput.
        has_exact_lengths: outputs must have the requested length.
    """
    completed = outcome.completed
    cached = [record.num_cached_tokens for record in completed if record.num_cached_tokens is not None]
    return Summary(
        seconds=outcome.seconds,
        num_sent=len(outcome.records),
        num_completed=len(completed),
        errors=_grouped([record.error for record in outcome.records if record.error is not None]),
        num_interrupted=sum(record.is_interrupted for record in outcome.records),
        num_unsent=outcome.num_unsent,
        num_prompt_tokens=sum(record.num_prompt_tokens for record in completed),
        num_cached_tokens=sum(cached) if cached else None,
        num_output_tokens=sum(record.num_output_tokens for record in completed),
        has_usage=all(record.has_usage for record in completed),
        num_other_lengths=sum(
            has_exact_lengths and record.num_output_tokens != record.asked_output_tokens for record in completed
        ),
        num_other_prompts=sum(
            record.asked_prompt_tokens not in (None, record.num_prompt_tokens) for record in completed
        ),
        peak_concurrency=_peak(outcome.records),
        longest_wait_s=max((record.wait_s for record in outcome.records), default=0.0),
        percentiles={name: Percentiles.of(values_s(name, completed)) for name in METRICS},
        goodput_per_s=_goodput(completed, limits_ms, outcome.seconds) if limits_ms else None,
        client_cpu_s=outcome.client_cpu_s,
        server_cpu_s=server_cpu_s,
    )


def _grouped(messages: Iterable[str]) -> dict[str, int]:
    """Count messages, with those that differ only in numbers and request ids under the first of them."""
    groups: dict[str, list[str]] = {}
    for message in messages:
        status, _, rest = message.partition(":")
        groups.setdefault(status + re.sub(r"\b[\w-]*\d[\w-]*", "0", rest), []).append(message)
    return {each[0]: len(each) for each in sorted(groups.values(), key=len, reverse=True)}


def values_s(metric: str, records: Iterable[Record]) -> list[float]:
    """Return all values of a metric, in seconds."""
    if metric == "itl":
        return [gap for record in records for gap in record.gaps_s]
    return [value for record in records if (value := _value(metric, record)) is not None]


def _value(metric: str, record: Record) -> float | None:
    return {"ttft": record.ttft_s, "tpot": record.tpot_s, "latency": record.latency_s}[metric]


def _goodput(records: Sequence[Record], limits_ms: Mapping[str, float], seconds: float) -> float:
    def is_good(record: Record) -> bool:
        found = {name: _value(name, record) for name in limits_ms}
        return all(value is None or 1e3 * value <= limits_ms[name] for name, value in found.items())

    return sum(map(is_good, records)) / seconds if seconds else 0.0


def _peak(records: Sequence[Record]) -> int:
    changes = [(record.sent_s, 1) for record in records]
    changes += [(record.sent_s + record.latency_s, -1) for record in records]
    return max(itertools.accumulate((change for _, change in sorted(changes)), initial=0))
