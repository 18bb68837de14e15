"""Command ``minisgl bench``."""

from types import SimpleNamespace
from typing import Any

import click

from minisgl_core.cli.options import pick, with_options
from minisgl_core.config.options import EngineConfig
from minisgl_server.bench.accuracy.command import accuracy
from minisgl_server.bench.attention.command import attention
from minisgl_server.bench.flags import OutputFile, given_flags, refuse_flags
from minisgl_server.bench.route.command import route
from minisgl_server.bench.scheduler.command import scheduler
from minisgl_server.bench.serve.command import serve
from minisgl_server.bench.trace.command import trace


@click.group(invoke_without_command=True, context_settings={"show_default": True})
@click.pass_context
def bench(ctx: click.Context) -> None:
    """Measure throughput and latency. Without a subcommand, run offline with its defaults."""
    if ctx.invoked_subcommand is None:
        with offline.make_context("offline", [], parent=ctx) as sub:
            offline.invoke(sub)


@bench.command()
@with_options(EngineConfig)
@click.option(
    "--workload",
    type=click.Choice(["uniform", "W"]),
    default="uniform",
    help="uniform: greedy, equal lengths. W: 256 sequences with 100 to 1024 input and output tokens, temperature 0.6.",
)
@click.option(
    "--batch-size",
    "batch_sizes",
    type=click.IntRange(1),
    multiple=True,
    default=(1, 16),
    help="Prompts per batch; may be given several times. (uniform)",
)
@click.option("--input-len", type=click.IntRange(1), default=64, help="Tokens per prompt. (uniform)")
@click.option("--output-len", type=click.IntRange(1), default=128, help="Tokens per output. (uniform)")
@click.option(
    "--prefill-len",
    type=click.IntRange(0),
    default=1024,
    help="Also measure one prompt of this many tokens with one output token; 0 skips it. (uniform)",
)
@click.option("--num-seqs", type=click.IntRange(1), default=256, help="Sequences. (W)")
@click.option("--repeats", type=click.IntRange(1), default=3, help="Measured runs per workload.")
@click.option(
    "--compare",
    type=click.Choice(["transformers"]),
    help="Also measure transformers' generate on the same model, dtype and shapes, in alternation. (uniform)",
)
@click.option("--json", "json_file", type=OutputFile(), help="Also write the results to this file.")
@click.pass_context
def offline(ctx: click.Context, /, values: dict[str, Any], sources: dict[str, str], **options: Any) -> None:
    """Measure a workload in this process, without a server."""
    from minisgl_server.bench.offline import run_offline

    uniform_flags = ("--batch-size", "--input-len", "--output-len", "--prefill-len", "--compare")
    is_w = options["workload"] == "W"
    refused = {"used with --workload uniform": uniform_flags} if is_w else {"used with --workload W": ("--num-seqs",)}
    refuse_flags(given_flags(ctx), refused)
    run_offline(EngineConfig.from_flat(**pick(values, EngineConfig)), SimpleNamespace(**options))


bench.add_command(accuracy)
bench.add_command(attention)
bench.add_command(route)
bench.add_command(scheduler)
bench.add_command(serve)
bench.add_command(trace)
