"""The options of ``minisgl bench serve``."""

from __future__ import annotations

import secrets
from typing import Any

import click

from minisgl_server.bench.flags import OutputFile, given_flags
from minisgl_server.bench.serve.options import JsonObjectType, LengthType, ServeOptions, check, parse_goodput

POSITIVE = click.FloatRange(0, min_open=True)
DEFAULT_NUM_REQUESTS = 100


@click.command()
@click.option("--url", default="http://127.0.0.1:1919", show_default=True, help="The server; with or without /v1.")
@click.option("--model", help="Name of the model there; the first that the server lists if missing.")
@click.option(
    "--api-key",
    envvar=["MINISGL_API_KEY", "OPENAI_API_KEY"],
    show_envvar=True,
    help="Better set in the environment, where other users do not see it.",
)
@click.option(
    "--endpoint",
    type=click.Choice(["completions", "chat"]),
    default="completions",
    show_default=True,
    help="completions: prompts of token ids. chat: messages of words, each of which is one token of --tokenizer.",
)
@click.option("--tokenizer", metavar="MODEL", help="Folder, .gguf file or hub name of the model whose tokenizer it is.")
@click.option(
    "--vocab-size", type=click.IntRange(16), default=10_000, show_default=True, help="Random token ids are below it."
)
@click.option(
    "--num-requests",
    type=click.IntRange(1),
    help=f"Requests of a run. {DEFAULT_NUM_REQUESTS} by default, or what --trace has, or what --duration has room for.",
)
@click.option("--duration", type=POSITIVE, help="Seconds of a run, after which nothing more is sent.")
@click.option(
    "--request-rate",
    "request_rates",
    type=POSITIVE,
    multiple=True,
    default=(float("inf"),),
    show_default=True,
    help="New conversations a second; inf for all at once. May be given several times: a run each.",
)
@click.option(
    "--burstiness",
    type=POSITIVE,
    default=1.0,
    show_default=True,
    help="1: arrivals are a Poisson process; less: in bursts; more: steadier; inf: a fixed rate.",
)
@click.option(
    "--max-concurrency",
    "max_concurrencies",
    type=click.IntRange(1),
    multiple=True,
    help="Conversations that run at once. May be given several times: a run each.",
)
@click.option(
    "--input-len",
    type=LengthType(),
    default="512",
    show_default=True,
    metavar="N|LOW:HIGH",
    help="New prompt tokens a request.",
)
@click.option(
    "--output-len", type=LengthType(), default="128", show_default=True, metavar="N|LOW:HIGH", help="Tokens an answer."
)
@click.option("--num-turns", type=click.IntRange(1), default=1, show_default=True, help="Requests a conversation.")
@click.option(
    "--turn-delay",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="Seconds from an answer to the next turn.",
)
@click.option(
    "--shared-prefix-tokens",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Tokens that all conversations begin with, before those of --input-len.",
)
@click.option(
    "--num-prefixes", type=click.IntRange(1), default=1, show_default=True, help="How many such beginnings there are."
)
@click.option(
    "--trace",
    type=click.Path(),
    metavar="FILE",
    help="Send the requests of a trace in the Qwen-Bailian format instead.",
)
@click.option(
    "--time-scale",
    "time_scales",
    type=POSITIVE,
    multiple=True,
    default=(1.0,),
    show_default=True,
    help="Factor on the trace's times: 0.5 sends twice as fast. May be given several times: a run each.",
)
@click.option(
    "--max-input-len", type=click.IntRange(1), help="Leave longer requests of the trace out; their number is reported."
)
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True)
@click.option(
    "--ignore-eos/--no-ignore-eos",
    default=True,
    show_default=True,
    help="Have each answer go on to the length asked for: an extension of vLLM, SGLang and minisgl.",
)
@click.option(
    "--extra-body", type=JsonObjectType(), default="{}", metavar="JSON", help="Further fields of each request."
)
@click.option("--timeout", type=POSITIVE, default=600.0, show_default=True, help="Seconds that a request may take.")
@click.option(
    "--num-warmups", type=click.IntRange(0), default=1, show_default=True, help="Requests before, which do not count."
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    help="Of arrivals, lengths and tokens. A new one each time if missing: a server that has seen the prompts has them cached.",
)
@click.option(
    "--goodput",
    multiple=True,
    metavar="METRIC:MS",
    help="Count the requests that keep a limit, such as ttft:200, tpot:50 or latency:5000. May be given several times.",
)
@click.option(
    "--server-pid",
    "server_pids",
    type=click.IntRange(1),
    multiple=True,
    help="Measure the processor time of this process and its children. A minisgl on this machine is found without.",
)
@click.option("--json", "json_file", type=OutputFile(), help="Write the results to this file, too.")
@click.option("--details", is_flag=True, help="With --json: every request, too.")
@click.option(
    "--plot",
    type=OutputFile(),
    help="Draw the results into this .png or .svg file. Needs: pip install 'minisgl-server[plot]'",
)
@click.pass_context
def serve(ctx: click.Context, /, **values: Any) -> None:
    """Put load on a server that speaks OpenAI's API, and measure it.

    The server may be minisgl, vLLM, SGLang or another. Requests are streamed. Each run of a sweep has prompts of its own.
    """
    from minisgl_server.bench.serve.run import run_serve

    values["goodput"] = parse_goodput(values["goodput"])
    values["max_concurrencies"] = values["max_concurrencies"] or (None,)
    if values["num_requests"] is None and values["duration"] is None and values["trace"] is None:
        values["num_requests"] = DEFAULT_NUM_REQUESTS
    if values["seed"] is None:
        values["seed"] = secrets.randbelow(2**32)
    options = ServeOptions(**values)
    check(options, given_flags(ctx))
    run_serve(options)
