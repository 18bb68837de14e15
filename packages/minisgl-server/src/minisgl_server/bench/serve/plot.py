"""Figures of a measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minisgl_core.errors import InvalidValueError
from minisgl_server.bench.serve.report import Measured
from minisgl_server.bench.serve.statistics import METRICS, values_s

SUFFIXES = (".png", ".svg")
SHOWN = ("ttft", "tpot", "latency")


def load(path: Path) -> Callable[[Sequence[Measured]], None]:
    """What draws into a file; loads matplotlib, so that its absence is known before anything is measured.

    Raises:
        InvalidValueError: the file is of another format, or matplotlib is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidValueError("--plot", str(path), "a file that ends in .png or .svg")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        remedy = "Try: pip install 'minisgl-server[plot]'"
        raise InvalidValueError("--plot", str(path), "used with matplotlib installed", remedy) from None

    def draw(measured: Sequence[Measured]) -> None:
        figure = Figure(figsize=(11, 7), layout="constrained")
        axes = figure.subplots(2, 2).flat
        for axis, name in zip(axes, SHOWN, strict=False):
            _draw_shares(axis, name, measured)
        _draw_throughput(axes[3], measured)
        figure.savefig(path)

    return draw


def _draw_shares(axis: Any, name: str, measured: Sequence[Measured]) -> None:
    """Which share of the requests took up to so long."""
    for each in measured:
        values = 1e3 * np.sort(values_s(name, each.outcome.answered))
        if len(values):
            axis.ecdf(values, label=each.run.label)
    axis.set(title=METRICS[name], xlabel="ms", ylabel="share of requests")
    axis.grid(alpha=0.3)
    if axis.lines:
        axis.legend(fontsize="small")


def _draw_throughput(axis: Any, measured: Sequence[Measured]) -> None:
    """Output tokens a second over the median time per output token: the trade that a sweep looks for."""
    for each in measured:
        summary, spread = each.summary, each.summary.spreads["tpot"]
        if spread is not None:
            axis.scatter(spread.p50, summary.per_s(summary.num_output_tokens), label=each.run.label)
    axis.set(title="throughput", xlabel="median time per output token, ms", ylabel="output tokens/s")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
