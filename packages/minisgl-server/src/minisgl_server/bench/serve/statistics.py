"""From the records of a run to the numbers that are reported."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from minisgl_server.bench.serve.cpu import serving_seconds
from minisgl_server.bench.serve.load import Outcome
from minisgl_server.bench.serve.request import Record

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "latency": "end to end",
}
"""Reported with mean and percentiles: names in JSON, and titles."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread | None:
        """None where there is nothing."""
        if not len(seconds):
            return None
        values = 1e3 * np.asarray(seconds)
        p50, p90, p99 = map(float, np.percentile(values, [50, 90, 99]))
        return cls(float(values.mean()), p50, p90, p99, float(values.max()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run in numbers. Times and tokens are of the requests that were answered.

    Attributes:
        seconds: from the start to the last event.
        num_sent: requests.
        num_answered: with a whole answer.
        errors: failed requests by what went wrong, the most frequent first; messages that differ in numbers only are one.
        num_interrupted: still running when the user ended the run.
        num_unsent: later turns of conversations of which a request failed.
        num_prompt_tokens: of the prompts.
        num_cached_tokens: those of them that were in a prefix cache; None where the server does not say.
        num_output_tokens: of the answers.
        is_counted: whether the server counted its tokens; if not, events are counted.
        num_other_lengths: answers of another length than asked for.
        num_other_prompts: prompts that have another length to the server.
        peak_concurrency: most requests at once.
        longest_wait_s: of a conversation that was due and had to wait, for ``--max-concurrency`` or for the load generator.
        spreads: by `METRICS`.
        goodput_per_s: requests a second that kept every limit; None without limits.
        client_cpu_s: processor time of the load generator.
        server_cpu_s: processor time of the server's processes by name; empty where it is not known.
    """

    seconds: float
    num_sent: int
    num_answered: int
    errors: dict[str, int]
    num_interrupted: int
    num_unsent: int
    num_prompt_tokens: int
    num_cached_tokens: int | None
    num_output_tokens: int
    is_counted: bool
    num_other_lengths: int
    num_other_prompts: int
    peak_concurrency: int
    longest_wait_s: float
    spreads: dict[str, Spread | None]
    goodput_per_s: float | None
    client_cpu_s: float
    server_cpu_s: dict[str, float]

    @property
    def num_failed(self) -> int:
        """Requests without a whole answer that were not interrupted."""
        return sum(self.errors.values())

    @property
    def hit_rate(self) -> float | None:
        """Share of the prompt tokens that a prefix cache held."""
        if self.num_cached_tokens is None or not self.num_prompt_tokens:
            return None
        return self.num_cached_tokens / self.num_prompt_tokens

    def per_s(self, count: float) -> float:
        """A rate over the run."""
        return count / self.seconds if self.seconds else 0.0

    def us_per_token(self, seconds: float) -> float | None:
        """Microseconds an output token."""
        return 1e6 * seconds / self.num_output_tokens if self.num_output_tokens else None

    @property
    def serving_us_per_token(self) -> float | None:
        """Of minisgl's API server and tokenizer workers together."""
        found = serving_seconds(self.server_cpu_s)
        return None if found is None else self.us_per_token(found)


def summarize(
    outcome: Outcome, limits_ms: Mapping[str, float], has_exact_lengths: bool, server_cpu_s: dict[str, float]
) -> Summary:
    """The numbers of a run.

    Args:
        outcome: the run.
        limits_ms: by metric, what a request must keep to count for the goodput.
        has_exact_lengths: whether answers must have the length asked for.
        server_cpu_s: of the server's processes.
    """
    answered = outcome.answered
    cached = [record.num_cached_tokens for record in answered if record.num_cached_tokens is not None]
    return Summary(
        seconds=outcome.seconds,
        num_sent=len(outcome.records),
        num_answered=len(answered),
        errors=_grouped([record.error for record in outcome.records if record.error is not None]),
        num_interrupted=sum(record.is_interrupted for record in outcome.records),
        num_unsent=outcome.num_unsent,
        num_prompt_tokens=sum(record.num_prompt_tokens for record in answered),
        num_cached_tokens=sum(cached) if cached else None,
        num_output_tokens=sum(record.num_output_tokens for record in answered),
        is_counted=all(record.has_usage for record in answered),
        num_other_lengths=sum(
            has_exact_lengths and record.num_output_tokens != record.asked_output_tokens for record in answered
        ),
        num_other_prompts=sum(
            record.asked_prompt_tokens not in (None, record.num_prompt_tokens) for record in answered
        ),
        peak_concurrency=_peak(outcome.records),
        longest_wait_s=max((record.wait_s for record in outcome.records), default=0.0),
        spreads={name: Spread.of(values_s(name, answered)) for name in METRICS},
        goodput_per_s=_goodput(answered, limits_ms, outcome.seconds) if limits_ms else None,
        client_cpu_s=outcome.client_cpu_s,
        server_cpu_s=server_cpu_s,
    )


def _grouped(messages: Iterable[str]) -> dict[str, int]:
    """Count messages under the first of each kind; numbers and request ids make no other kind."""
    groups: dict[str, list[str]] = {}
    for message in messages:
        status, _, rest = message.partition(":")
        groups.setdefault(status + re.sub(r"\b[\w-]*\d[\w-]*", "0", rest), []).append(message)
    return {each[0]: len(each) for each in sorted(groups.values(), key=len, reverse=True)}


def values_s(metric: str, records: Iterable[Record]) -> list[float]:
    """All values of a metric, in seconds."""
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
    peak = now = 0
    for _, change in sorted(changes):
        now += change
        peak = max(peak, now)
    return peak
