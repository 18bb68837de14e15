"""Command ``minisgl bench scheduler``."""

from types import SimpleNamespace
from typing import Any

import click

from minisgl_server.bench.flags import OutputFile


@click.command()
@click.option(
    "--requests",
    "batch_sizes",
    type=click.IntRange(1, 2**16),
    multiple=True,
    default=(64, 1024, 4096),
    help="Decoding requests per step; may be given several times.",
)
@click.option("--cached-pages", type=click.IntRange(0, 2**24), default=1_000_000, help="Pages in the cache.")
@click.option("--cache", default="radix", help="Provider of the prefix cache.")
@click.option("--page-size", type=click.IntRange(1, 1024), default=16, help="Tokens per page.")
@click.option("--input-len", type=click.IntRange(2), default=512, help="Tokens per prompt; half are cached.")
@click.option("--steps", "num_steps", type=click.IntRange(2), default=200, help="Measured steps.")
@click.option("--disable-overlap", is_flag=True, help="Process each step before the next one is scheduled.")
@click.option("--json", "json_file", type=OutputFile(), help="Also write the results to this file.")
def scheduler(**values: Any) -> None:
    """Time the scheduler's part of a decode step, with a full KV pool and random tokens instead of a model.

    The times are CPU times, medians per step: schedule and process are those of the scheduler, and encode that of the messages to
    the tokenizer workers. Admission is schedule plus process time per prompt, beyond that of a decode step.
    """
    from minisgl_server.bench.scheduler.run import run_scheduler

    run_scheduler(SimpleNamespace(**values))
