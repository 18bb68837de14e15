"""Command ``minisgl bench``."""

from types import SimpleNamespace
from typing import Any

import click

from minisgl_core.cli.options import pick, with_options
from minisgl_core.config.options import EngineConfig
from minisgl_server.bench.attention.command import attention
from minisgl_server.bench.flags import json_option, refuse_flags
from minisgl_server.bench.route.command import route
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
@json_option
@click.pass_context
def offline(ctx: click.Context, /, values: dict[str, Any], sources: dict[str, str], **options: Any) -> None:
    """Measure a workload in this process, without a server."""
    from minisgl_server.bench.offline import run_offline

    is_w = options["workload"] == "W"
    uniform_flags = ("--batch-size", "--input-len", "--output-len", "--prefill-len", "--compare")
    refuse_flags(ctx, is_w, "used with --workload uniform", *uniform_flags)
    refuse_flags(ctx, not is_w, "used with --workload W", "--num-seqs")
    run_offline(EngineConfig.from_flat(**pick(values, EngineConfig)), SimpleNamespace(**options))


@bench.command()
@with_options(EngineConfig, hidden=("kv_dtype", "quantization"))  # the command sets both, and refuses other values
@click.option(
    "--text",
    "texts",
    type=click.Path(exists=True, dir_okay=False),
    multiple=True,
    required=True,
    help="File with text to evaluate; may be given several times.",
)
@click.option("--window", type=click.IntRange(2), default=512, help="Tokens per evaluated sequence.")
@click.option("--max-tokens", type=click.IntRange(2), default=8192, help="Maximum number of tokens to evaluate.")
@json_option
def accuracy(values: dict[str, Any], sources: dict[str, str], **options: Any) -> None:
    """Compare logits with an FP8 KV cache and with quantized weights to those with neither."""
    from minisgl_server.bench.accuracy import run_accuracy

    run_accuracy(EngineConfig.from_flat(**pick(values, EngineConfig)), **options)


@bench.command()
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
@json_option
def scheduler(**values: Any) -> None:
    """Time the scheduler's part of a decode step, with a full KV pool and random tokens instead of a model.

    The times are CPU times, medians per step: schedule and process are those of the scheduler, and encode that of the messages to
    the tokenizer workers. Admission is schedule plus process time per prompt, beyond that of a decode step.
    """
    from minisgl_server.bench.scheduler import run_scheduler

    run_scheduler(SimpleNamespace(**values))


for _command in (attention, route, serve, trace):
    bench.add_command(_command)
