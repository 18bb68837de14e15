"""Command ``minisgl bench route``."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import click

from minisgl_server.bench.flags import OutputFile, given_flags, refuse_flags
from minisgl_server.bench.route.step_time import StepTime

ROUTERS = ("round-robin", "least-loaded", "prefix")
MAX_SCHEDULERS, MAX_REPLICAS = 32, 1000
CHAT_FLAGS = (
    "--num-turns",
    "--num-prefixes",
    "--shared-prefix-tokens",
    "--input-len",
    "--output-len",
    "--request-rate",
    "--turn-delay",
)

STEP_TIME = {
    "weights_ms": "Time to read the weights, the minimum of a step.",
    "token_us": "GEMM time per token.",
    "request_us": "Further time per decoding request.",
    "kv_token_ns": "Time per token of KV that a decode reads.",
    "pair_ns": "Prefill attention time per pair of a prompt token and a token of its context.",
}
"""Help of the options that are fields of `StepTime`."""


def with_step_time(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of `STEP_TIME`."""
    for name, text in reversed(STEP_TIME.items()):
        default, flag = getattr(StepTime(), name), f"--{name.replace('_', '-')}"
        command = click.option(flag, type=click.FloatRange(0), default=default, help=text)(command)
    return command


@click.command()
@click.option("--trace", type=click.Path(), metavar="FILE", help="Replay a trace in the Qwen-Bailian format.")
@click.option("--time-scale", type=click.FloatRange(0), default=1.0, help="Factor on its times.")
@click.option("--num-requests", type=click.IntRange(1), default=2000, help="Requests to run.")
@click.option("--num-turns", type=click.IntRange(1), default=5, help="Requests per chat.")
@click.option("--num-prefixes", type=click.IntRange(1), default=16, help="System prompts.")
@click.option("--shared-prefix-tokens", type=click.IntRange(0), default=1024, help="Tokens per system prompt.")
@click.option("--input-len", type=click.IntRange(1), default=128, help="Mean tokens of a message.")
@click.option("--output-len", type=click.IntRange(1), default=128, help="Mean tokens of an output.")
@click.option("--request-rate", type=click.FloatRange(0, min_open=True), default=16.0, help="Requests per second.")
@click.option("--turn-delay", type=click.FloatRange(0), default=30.0, help="Mean seconds between turns.")
@click.option("--seed", type=click.IntRange(0), default=0)
@click.option("--replicas", type=click.IntRange(1, MAX_REPLICAS), default=4)
@click.option(
    "--replica-model",
    type=click.Choice(["scheduler", "simple"]),
    help=f"scheduler runs the scheduler and the radix cache; it is the default, for up to {MAX_SCHEDULERS} replicas. simple has a"
    " set of block keys as its cache and simulates several decode steps at once.",
)
@click.option("--router", "routers", multiple=True, default=ROUTERS, help="May be given several times.")
@click.option("--router-overload-requests", type=click.IntRange(0), default=16)
@click.option("--router-overload-ratio", type=click.FloatRange(1), default=1.5)
@click.option("--num-pages", type=click.IntRange(1), help="Pages per replica.")
@click.option(
    "--working-set",
    type=click.FloatRange(0, min_open=True),
    default=0.667,
    help="Choose --num-pages so that the distinct pages of all requests are this fraction of all pages.",
)
@click.option("--page-size", type=click.IntRange(1), default=16, help="Tokens per page.")
@click.option("--max-running-requests", type=click.IntRange(1), default=256)
@click.option("--max-prefill-length", type=click.IntRange(1), default=8192)
@with_step_time
@click.option("--json", "json_file", type=OutputFile(), help="Also write the results to this file.")
@click.pass_context
def route(ctx: click.Context, /, **values: Any) -> None:
    """Simulate routers with replicas in virtual time, on a trace or on chats with shared system prompts.

    The router is the real one. The GEMMs of a step take the longer of --weights-ms and --token-us times its tokens. The times of
    decodes and attention are added. The defaults are for Qwen3-14B on one H200.
    """
    from minisgl_server.bench.route.run import run_route

    given = given_flags(ctx)
    if values["trace"] is not None:
        refuse_flags(given, {"left out with --trace": (*CHAT_FLAGS, "--seed")})
    else:
        refuse_flags(given, {"used with --trace": ("--time-scale",)})
    if values["num_pages"] is not None:
        refuse_flags(given, {"left out with --num-pages": ("--working-set",)})
    if "--num-requests" not in given and values["trace"] is not None:
        values["num_requests"] = None
    run_route(SimpleNamespace(**values))
