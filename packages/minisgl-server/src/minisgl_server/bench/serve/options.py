"""Options of ``minisgl bench serve``. Must not import heavy packages."""

import itertools
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import click
import msgspec

from minisgl_core.errors import InvalidValueError
from minisgl_server.bench.flags import refuse_flags

METRIC_NAMES = ("ttft", "tpot", "latency")
"""Metrics that ``--goodput`` can limit."""


@dataclass(frozen=True, slots=True)
class Run:
    """Parameters of one run of a sweep. Without a trace, `time_scale` is None, as is `max_concurrency` without a limit."""

    number: int
    request_rate: float
    max_concurrency: int | None
    time_scale: float | None

    @property
    def label(self) -> str:
        """Name of the run in tables."""
        parts = [f"trace x {self.time_scale:g}"] if self.time_scale is not None else []
        if not math.isinf(self.request_rate):
            parts.append(f"{self.request_rate:g}/s")
        if self.max_concurrency is not None:
            parts.append(f"{self.max_concurrency} at once")
        return ", ".join(parts) or "all at once"


def runs(options: SimpleNamespace) -> Iterator[Run]:
    """Yield every run of the sweep."""
    product = itertools.product(options.time_scales, options.request_rates, options.max_concurrencies)
    for number, (scale, rate, limit) in enumerate(product):
        yield Run(number, rate, limit, scale if options.trace else None)


def parse_length(text: str) -> tuple[int, int]:
    """Return (low, high) of a length ``N`` or ``LOW:HIGH``."""
    low, _, high = text.partition(":")
    with suppress(ValueError):
        if 1 <= int(low) <= int(high or low):
            return int(low), int(high or low)
    raise click.BadParameter(f"{text!r} is neither a number of tokens nor LOW:HIGH, both 1 or more.")


def parse_json_object(text: str) -> dict[str, Any]:
    """Return a JSON object."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise click.BadParameter(f"{text!r} is not a JSON object, such as '{{}}': {error}.") from None


def parse_goodput(text: str) -> tuple[str, float]:
    """Return the metric and the limit in milliseconds of a value such as ``ttft:200``."""
    name, _, limit = text.partition(":")
    with suppress(ValueError):
        if name in METRIC_NAMES and float(limit) > 0:
            return name, float(limit)
    names = ", ".join(METRIC_NAMES)
    raise click.BadParameter(f"{text!r} is not a metric ({names}), a colon and milliseconds, such as ttft:200.")


def check_options(options: SimpleNamespace, ctx: click.Context) -> None:
    """Refuse flags that have no effect, and values that are not possible."""
    random_flags = ("--input-len", "--output-len", "--num-turns", "--shared-prefix-tokens", "--num-prefixes")
    arrival_flags = ("--turn-delay", "--request-rate", "--burstiness")
    refuse = partial(refuse_flags, ctx)
    refuse(options.trace, "given without --trace, which has its own requests and times", *random_flags, *arrival_flags)
    refuse(not options.trace, "used with --trace", "--time-scale", "--max-input-len")
    refuse(options.num_turns == 1, "used with --num-turns of 2 or more", "--turn-delay")
    refuse(not options.shared_prefix_tokens, "used with --shared-prefix-tokens", "--num-prefixes")
    refuse(all(map(math.isinf, options.request_rates)), "used with a finite --request-rate", "--burstiness")
    has_own_vocab = options.endpoint == "chat" or options.tokenizer
    refuse(has_own_vocab, "used with --endpoint completions and without --tokenizer, which has its own", "--vocab-size")
    refuse(not options.json_file, "used with --json", "--details")
    is_endless = options.num_requests is None and not options.trace
    if is_endless and any(
        math.isinf(rate) and limit is None for rate in options.request_rates for limit in options.max_concurrencies
    ):
        remedy = "Otherwise, the number of requests has no limit."
        raise InvalidValueError(
            "--duration", options.duration, "used with --num-requests, --request-rate or --max-concurrency", remedy
        )
