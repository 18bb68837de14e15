"""Command ``minisgl bench route``."""

from types import SimpleNamespace
from typing import Any

import click

from minisgl_core.errors import InvalidValueError
from minisgl_server.bench.flags import FloatRange, json_option, refuse_flags
from minisgl_server.bench.route.step_time import StepTime

MAX_SCHEDULERS, MAX_REPLICAS = 32, 1000
DEFAULT_NUM_REQUESTS = 2000
CHAT_FLAGS = ("--num-turns", "--num-prefixes", "--shared-prefix-tokens", "--input-len", "--output-len", "--seed")
ARRIVAL_FLAGS = ("--request-rate", "--turn-delay")
POSITIVE, UP_TO_A_MILLION = FloatRange(1e-6), FloatRange(0, 1_000_000)


@click.command()
@click.option("--trace", type=click.Path(), metavar="FILE", help="Replay a trace in the Qwen-Bailian format.")
@click.option("--time-scale", type=UP_TO_A_MILLION, default=1.0, help="Factor on its times.")
@click.option(
    "--num-requests",
    type=click.IntRange(1),
    help=f"Requests to run. By default, {DEFAULT_NUM_REQUESTS}, or those of --trace.",
)
@click.option("--num-turns", type=click.IntRange(1), default=5, help="Requests per chat.")
@click.option("--num-prefixes", type=click.IntRange(1), default=16, help="System prompts.")
@click.option("--shared-prefix-tokens", type=click.IntRange(0), default=1024, help="Tokens per system prompt.")
@click.option("--input-len", type=click.IntRange(1), default=128, help="Mean tokens of a message.")
@click.option("--output-len", type=click.IntRange(1), default=128, help="Mean tokens of an output.")
@click.option("--request-rate", type=POSITIVE, default=16.0, help="Requests per second.")
@click.option("--turn-delay", type=UP_TO_A_MILLION, default=30.0, help="Mean seconds between turns.")
@click.option("--seed", type=click.IntRange(0), default=0)
@click.option("--replicas", type=click.IntRange(1, MAX_REPLICAS), default=4)
@click.option(
    "--replica-model",
    type=click.Choice(["scheduler", "simple"]),
    help=f"scheduler runs the scheduler and the radix cache; it is the default, for up to {MAX_SCHEDULERS} replicas. simple has"
    " an LRU set of hashes of prefixes as its cache, one per page.",
)
@click.option(
    "--router",
    "routers",
    multiple=True,
    default=("round-robin", "least-loaded", "prefix"),
    help="Router to simulate; may be given several times.",
)
@click.option("--router-overload-requests", type=click.IntRange(0), default=16)
@click.option("--router-overload-ratio", type=FloatRange(1), default=1.5)
@click.option("--num-pages", type=click.IntRange(1), help="Pages per replica.")
@click.option(
    "--working-set",
    type=POSITIVE,
    default=0.667,
    help="Choose --num-pages so that the distinct pages of all requests are this fraction of all replicas' pages.",
)
@click.option("--page-size", type=click.IntRange(1), default=16, help="Tokens per page.")
@click.option("--max-running-requests", type=click.IntRange(1), default=256)
@click.option("--max-prefill-length", type=click.IntRange(1), default=8192)
@click.option(
    "--weights-ms",
    type=UP_TO_A_MILLION,
    default=StepTime.weights_ms,
    help="Time to read the weights, the minimum of a step.",
)
@click.option("--token-us", type=UP_TO_A_MILLION, default=StepTime.token_us, help="GEMM time per token.")
@click.option(
    "--request-us", type=UP_TO_A_MILLION, default=StepTime.request_us, help="Further time per decoding request."
)
@click.option(
    "--kv-token-ns",
    type=UP_TO_A_MILLION,
    default=StepTime.kv_token_ns,
    help="Time per token of KV that a decode reads.",
)
@click.option(
    "--pair-ns",
    type=UP_TO_A_MILLION,
    default=StepTime.pair_ns,
    help="Prefill attention time per pair of a prompt token and a token of its context.",
)
@json_option
@click.pass_context
def route(ctx: click.Context, /, **values: Any) -> None:
    """Simulate routers with replicas in virtual time, on a trace or on chats with shared system prompts.

    The router is the real one. The GEMMs of a step take the longer of --weights-ms and --token-us times its tokens. The times of
    decodes and attention are added. The defaults are for Qwen3-14B on one H200.
    """
    from minisgl_server.bench.route.run import run_route

    num, model = values["replicas"], values["replica_model"]
    if model == "scheduler" and num > MAX_SCHEDULERS:
        raise InvalidValueError("--replicas", num, f"at most {MAX_SCHEDULERS} with --replica-model scheduler")
    values["replica_model"] = model or ("scheduler" if num <= MAX_SCHEDULERS else "simple")
    has_trace = values["trace"] is not None
    refuse_flags(ctx, has_trace, "left out with --trace", *CHAT_FLAGS, *ARRIVAL_FLAGS)
    refuse_flags(ctx, not has_trace, "used with --trace", "--time-scale")
    refuse_flags(ctx, values["num_pages"], "left out with --num-pages", "--working-set")
    if not has_trace:
        values["num_requests"] = values["num_requests"] or DEFAULT_NUM_REQUESTS
    run_route(SimpleNamespace(**values))
