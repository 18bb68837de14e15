"""Plots of a measurement."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from minisgl_core.errors import InvalidValueError
from minisgl_server.bench.serve.report import Measured
from minisgl_server.bench.serve.summary import METRICS, values_s

SUFFIXES = (".png", ".svg")
SHOWN = ("ttft", "tpot", "latency")


def make_plotter(path: Path) -> Callable[[Sequence[Measured]], None]:
    """Return a function that plots to a file. It imports matplotlib now, so that a missing one is reported before measuring."""
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidValueError("--plot", str(path), "a file that ends in .png or .svg")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        remedy = "Try: pip install 'minisgl-server[plot]'"
        raise InvalidValueError("--plot", str(path), "used with matplotlib installed", remedy) from None

    def draw(measured: Sequence[Measured]) -> None:
        figure = Figure(figsize=(11, 7), layout="constrained")
        *axes, last = figure.subplots(2, 2).flat
        for axis, name in zip(axes, SHOWN, strict=True):  # cumulative distributions over the requests
            for each in measured:
                values = 1e3 * np.sort(values_s(name, each.outcome.completed))
                if len(values):
                    axis.ecdf(values, label=each.run.label)
            axis.set(title=METRICS[name], xlabel="ms", ylabel="share of requests")
            axis.grid(alpha=0.3)
            if axis.lines:
                axis.legend(fontsize="small")
        for each in measured:
            if each.summary["tpot_ms"] is not None:
                last.scatter(each.summary["tpot_ms"]["p50"], each.summary["output_tokens_per_s"], label=each.run.label)
        last.set(title="throughput", xlabel="median time per output token, ms", ylabel="output tokens/s")
        last.set_ylim(bottom=0)
        last.grid(alpha=0.3)
        figure.savefig(path)

    return draw
