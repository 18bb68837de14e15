"""Command ``minisgl bench serve``."""

import secrets
from types import SimpleNamespace
from typing import Any

import click

from minisgl_server.bench.flags import FloatRange, file_option, json_option
from minisgl_server.bench.serve.options import check_options, parse_goodput, parse_json_object, parse_length

POSITIVE = FloatRange(0, min_open=True)
LENGTH: dict[str, Any] = {"type": parse_length, "metavar": "N|LOW:HIGH"}
DEFAULT_NUM_REQUESTS = 100


@click.command()
@click.option("--url", default="http://127.0.0.1:1919", help="URL of the server, with or without /v1.")
@click.option("--model", help="Name of the model; by default, the first that the server lists.")
@click.option(
    "--api-key",
    envvar=["MINISGL_API_KEY", "OPENAI_API_KEY"],
    show_envvar=True,
    help="API key; in the environment, other users cannot see it.",
)
@click.option(
    "--endpoint",
    type=click.Choice(["completions", "chat"]),
    default="completions",
    help="completions: prompts of token ids. chat: messages of words that are one token of --tokenizer each.",
)
@click.option("--tokenizer", metavar="MODEL", help="Folder, .gguf file or hub name of the model with the tokenizer.")
@click.option("--vocab-size", type=click.IntRange(16), default=10_000, help="Random token ids are below this number.")
@click.option(
    "--num-requests",
    type=click.IntRange(1),
    help=f"Requests per run. By default, {DEFAULT_NUM_REQUESTS}, or those of --trace, or as many as --duration allows.",
)
@click.option("--duration", type=POSITIVE, help="Seconds per run, after which no request is sent.")
@click.option(
    "--request-rate",
    "request_rates",
    type=POSITIVE,
    multiple=True,
    default=(float("inf"),),
    help="New conversations per second; inf for all at once. May be given several times, with one run each.",
)
@click.option(
    "--burstiness",
    type=POSITIVE,
    default=1.0,
    help="1: Poisson arrivals; less: burstier; more: more regular; inf: a fixed rate.",
)
@click.option(
    "--max-concurrency",
    "max_concurrencies",
    type=click.IntRange(1),
    multiple=True,
    help="Maximum concurrent conversations. May be given several times, with one run each.",
)
@click.option("--input-len", **LENGTH, default="512", help="New prompt tokens per request.")
@click.option("--output-len", **LENGTH, default="128", help="Output tokens per request.")
@click.option("--num-turns", type=click.IntRange(1), default=1, help="Requests per conversation.")
@click.option("--turn-delay", type=FloatRange(0), default=0.0, help="Seconds from a response to the next turn.")
@click.option(
    "--shared-prefix-tokens",
    type=click.IntRange(0),
    default=0,
    help="Tokens of the shared prefix of all conversations, in addition to --input-len.",
)
@click.option("--num-prefixes", type=click.IntRange(1), default=1, help="Number of distinct shared prefixes.")
@click.option(
    "--trace",
    type=click.Path(),
    metavar="FILE",
    help="Send the requests of a trace in the Qwen-Bailian format instead of random ones.",
)
@click.option(
    "--time-scale",
    "time_scales",
    type=POSITIVE,
    multiple=True,
    default=(1.0,),
    help="Factor on the trace's times: 0.5 doubles the rate. May be given several times, with one run each.",
)
@click.option("--max-input-len", type=click.IntRange(1), help="Skip longer requests of the trace, and report how many.")
@click.option("--temperature", type=FloatRange(0), default=0.0)
@click.option(
    "--ignore-eos/--no-ignore-eos",
    default=True,
    help="Generate exactly the requested output length: an extension of vLLM, SGLang and minisgl.",
)
@click.option(
    "--extra-body", type=parse_json_object, default="{}", metavar="JSON", help="Further fields of each request."
)
@click.option("--timeout", type=POSITIVE, default=600.0, help="Maximum seconds per request.")
@click.option("--num-warmups", type=click.IntRange(0), default=1, help="Requests before the measurement.")
@click.option(
    "--seed",
    type=click.IntRange(0),
    help="Seed of arrivals, lengths and tokens. By default random, as a server has the prompts of earlier runs cached.",
)
@click.option(
    "--goodput",
    type=parse_goodput,
    multiple=True,
    metavar="METRIC:MS",
    help="Count the requests within a limit, such as ttft:200, tpot:50 or latency:5000. May be given several times.",
)
@click.option(
    "--server-pid",
    "server_pids",
    type=click.IntRange(1),
    multiple=True,
    help="Measure the CPU time of this process and its children; by default, of a minisgl server on this machine.",
)
@json_option
@click.option("--details", is_flag=True, help="Include every request in --json.")
@file_option(
    "--plot",
    help="Plot the results to this .png or .svg file. Requires: pip install 'minisgl-server[plot]'",
)
@click.pass_context
def serve(ctx: click.Context, /, **values: Any) -> None:
    """Load an OpenAI-compatible server and measure it.

    The server may be minisgl, vLLM, SGLang or another one. Requests are streamed. Each run of a sweep has new prompts.
    """
    from minisgl_server.bench.serve.run import run_serve

    values["goodput"] = dict(values["goodput"])
    values["max_concurrencies"] = values["max_concurrencies"] or (None,)
    if values["num_requests"] is None and values["duration"] is None and values["trace"] is None:
        values["num_requests"] = DEFAULT_NUM_REQUESTS
    if values["seed"] is None:
        values["seed"] = secrets.randbelow(2**32)
    options = SimpleNamespace(**values)
    check_options(options, ctx)
    run_serve(options)
