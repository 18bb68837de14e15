"""Command ``minisgl bench trace``."""

from pathlib import Path

import click

from minisgl_server.bench.flags import FloatRange, file_option, refuse_flags
from minisgl_server.bench.trace.format import TRACE_A_REQUESTS


@click.command()
@file_option("--out", help="File to write, as JSON lines.")
@click.option(
    "--num-requests",
    type=click.IntRange(2),
    default=TRACE_A_REQUESTS,
    help="Number of requests; by default, that of trace A.",
)
@click.option("--seed", type=click.IntRange(0), default=0)
@click.option(
    "--request-rate", type=FloatRange(0, min_open=True), help="Requests per second; by default, those of trace A."
)
@click.option(
    "--output-median",
    type=FloatRange(1, 1_000_000),
    help="Median output length in tokens, which is not published. Longer outputs make later turns longer.",
)
@click.option("--show", type=click.Path(), metavar="FILE", help="Print the statistics of an existing trace instead.")
@click.pass_context
def trace(
    ctx: click.Context,
    /,
    out: str | None,
    num_requests: int,
    seed: int,
    request_rate: float | None,
    output_median: float | None,
    show: str | None,
) -> None:
    """Write a synthetic trace in the Qwen-Bailian format, with the published statistics of its trace A.

    No request in it was sent by a user. `minisgl bench serve --trace` sends the requests of a trace.
    """
    from minisgl_core.cli.table import print_table
    from minisgl_server.bench.trace.format import read_trace, write_trace
    from minisgl_server.bench.trace.synthetic import OUTPUT_MEDIAN, REQUESTS_PER_S, synthetic_trace
    from minisgl_server.bench.trace.trace_statistics import PUBLISHED, statistics

    if (out is None) == (show is None):
        raise click.UsageError("Give either --out, to write a trace, or --show, to print the statistics of one.")
    generator_flags = ("--num-requests", "--seed", "--request-rate", "--output-median")
    refuse_flags(ctx, out is None, "used with --out", *generator_flags)
    if show is not None:
        requests = read_trace(Path(show), flag="--show")
    else:
        assert out is not None
        rate, median = request_rate or REQUESTS_PER_S, output_median or OUTPUT_MEDIAN
        requests = list(synthetic_trace(num_requests, seed, rate, median))
        write_trace(Path(out), requests)
    rows = [
        (name, f"{value:.5g}", f"{PUBLISHED[name]:.5g}" if name in PUBLISHED else "not published")
        for name, value in statistics(requests).items()
    ]
    print_table(("", "this trace", "trace A"), rows)
