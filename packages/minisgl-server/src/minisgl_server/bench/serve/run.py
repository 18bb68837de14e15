"""``minisgl bench serve``, from its options to the report."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import click
import httpx

from minisgl_core.cli.table import print_table
from minisgl_core.config.options import ModelOptions
from minisgl_core.errors import InvalidValueError, MinisglError
from minisgl_core.model_source import locate_model, open_weights
from minisgl_core.plugins.registry import Registry
from minisgl_core.progress import progress_bar
from minisgl_server.bench.serve import plot, report
from minisgl_server.bench.serve.arrivals import arrivals
from minisgl_server.bench.serve.conversations import (
    Conversation,
    Lengths,
    RandomSpec,
    limited,
    random_conversations,
    trace_conversations,
)
from minisgl_server.bench.serve.cpu import ServerCpu, local_server
from minisgl_server.bench.serve.http import Address, HttpClient
from minisgl_server.bench.serve.load import Load, Outcome
from minisgl_server.bench.serve.options import Run, ServeOptions
from minisgl_server.bench.serve.prompts import ChatPrompts, IdPrompts
from minisgl_server.bench.serve.request import RequestMaker
from minisgl_server.bench.serve.statistics import summarize
from minisgl_server.bench.trace.format import read_trace
from minisgl_server.launch.keys import first_key

INTERRUPTED_STATUS = 130
WARM_UP_TOKENS = 8
"""Output tokens of a warm-up, at most."""

if sys.platform == "win32":
    new_event_loop = asyncio.new_event_loop
else:
    from uvloop import new_event_loop


def run_serve(options: ServeOptions) -> None:
    """Measure, print tables, and write the files that were asked for.

    Ends the process with status 130 where the user interrupted it, after the report of what there is, and with 1 where no
    request was answered.

    Raises:
        InvalidValueError: an option does not fit.
        MinisglError: the server cannot be asked for its model.
    """
    draw = None if options.plot is None else plot.load(Path(options.plot))
    address = _address(options.url)
    key = first_key(options.api_key)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    prompts = _prompts(options)
    workload = _workload(options, prompts)
    model = options.model or _first_model(address, headers)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    measured = _measure(options, address, headers, model, prompts, workload)

    click.echo("\n".join(report.headline(options, model, workload.note)))
    print_table(report.TITLES, [report.row(each) for each in measured])
    click.echo()
    print_table(report.SPREAD_TITLES, report.spread_rows(measured))
    for note in report.notes(measured, options.endpoint):
        click.echo(note)
    if options.json_file:
        found = report.as_json(options, model, started, workload.note, measured)
        Path(options.json_file).write_text(json.dumps(found, indent=2) + "\n")
    if draw is not None:
        draw(measured)
    if not measured or measured[-1].outcome.is_interrupted:
        sys.exit(INTERRUPTED_STATUS)
    if not any(each.summary.num_answered for each in measured):
        sys.exit(1)


@dataclass(frozen=True, slots=True)
class _Workload:
    """What to send: conversations of a run, or of a warm-up where there is none; and what to say about it."""

    conversations: Callable[[Run | None], Iterator[Conversation]]
    num_requests: int | None
    note: str


def _workload(options: ServeOptions, prompts: IdPrompts | ChatPrompts) -> _Workload:
    num_words = prompts.num_words
    template = prompts.num_template_tokens.get(0, 0) if isinstance(prompts, ChatPrompts) else 0
    if options.trace is not None:
        everything = read_trace(Path(options.trace), options.num_requests)
        longest = options.max_input_len or max(request.input_length for request in everything)
        requests = [request for request in everything if request.input_length <= longest]
        if not requests:
            shortest = min(request.input_length for request in everything)
            raise InvalidValueError("--max-input-len", longest, f"at least {shortest}, the shortest of the trace")
        left_out = len(everything) - len(requests)
        note = f"{len(requests)} requests of {options.trace}"
        note += f"; {left_out} of more than {longest} tokens were left out" if left_out else ""

        def of_trace(run: Run | None) -> Iterator[Conversation]:
            scale, variant = (1.0, 0) if run is None else (run.time_scale or 1.0, 1 + run.number)
            return trace_conversations(requests, scale, num_words, template, options.seed, variant)

        return _Workload(of_trace, len(requests), note)
    spec = RandomSpec(
        input_len=Lengths(*options.input_len),
        output_len=Lengths(*options.output_len),
        num_turns=options.num_turns,
        turn_delay_s=options.turn_delay,
        shared_prefix_tokens=options.shared_prefix_tokens,
        num_prefixes=options.num_prefixes,
    )

    def at_random(run: Run | None) -> Iterator[Conversation]:
        rate, variant = (float("inf"), 0) if run is None else (run.request_rate, 1 + run.number)
        times = arrivals(rate, options.burstiness, options.seed)
        return limited(random_conversations(spec, times, num_words, options.seed, variant), options.num_requests)

    note = f"random, {spec.input_len} tokens in and {spec.output_len} out"
    note += f", {spec.num_turns} turns" if spec.num_turns > 1 else ""
    if spec.shared_prefix_tokens:
        note += f", after {spec.shared_prefix_tokens} that {_groups(spec.num_prefixes)} share"
    return _Workload(at_random, options.num_requests, note)


def _measure(
    options: ServeOptions,
    address: Address,
    headers: dict[str, str],
    model: str,
    prompts: IdPrompts | ChatPrompts,
    workload: _Workload,
) -> list[report.Measured]:
    extra = {"temperature": options.temperature, **options.extra_body}
    maker = RequestMaker(options.endpoint, model, options.ignore_eos, extra, options.timeout)
    pids = options.server_pids or tuple(filter(None, [local_server(address)]))
    measured: list[report.Measured] = []

    async def measure_all() -> None:
        client = HttpClient(address, headers)
        try:
            warm_up = Load(client, maker, prompts, max_concurrency=1)
            if (await warm_up.run(_warm_up(workload, options.num_warmups))).is_interrupted:
                return
            for run in options.runs():
                with progress_bar() as bar:
                    task = bar.add_task(run.label, total=workload.num_requests)

                    def show(outcome: Outcome, label: str = run.label) -> None:
                        num_running = len(outcome.records) - outcome.num_ended
                        said = f"{label}: {num_running} running, {outcome.num_failed} failed"
                        bar.update(task, completed=outcome.num_ended, description=said)  # noqa: B023  # used in this turn

                    load = Load(client, maker, prompts, run.max_concurrency, options.duration, show)
                    server = ServerCpu(pids)
                    outcome = await load.run(workload.conversations(run))
                summary = summarize(outcome, options.goodput, options.ignore_eos, server.seconds())
                measured.append(report.Measured(run, outcome, summary))
                if outcome.is_interrupted:
                    return
        finally:
            client.close()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(measure_all())
    return measured


def _warm_up(workload: _Workload, num_requests: int) -> Iterator[Conversation]:
    """The first requests of a variant that no run has, with short answers."""
    for each in limited(workload.conversations(None), num_requests) if num_requests else ():
        turns = [turn.capped(WARM_UP_TOKENS) for turn in each.turns]
        yield Conversation(each.number, 0.0, each.prefix, turns)


def _prompts(options: ServeOptions) -> IdPrompts | ChatPrompts:
    if options.tokenizer is None:
        return IdPrompts(options.vocab_size) if options.endpoint == "completions" else ChatPrompts.approximate()
    path = locate_model(ModelOptions(model=options.tokenizer), "--tokenizer")
    tokenizer = open_weights(path, Registry.from_environment()).tokenizer()
    if options.endpoint == "completions":
        return IdPrompts(len(tokenizer))
    if tokenizer.chat_template is None:
        raise InvalidValueError("--tokenizer", options.tokenizer, "one with a chat template, for --endpoint chat")
    return ChatPrompts.of_tokenizer(tokenizer)


def _address(url: str) -> Address:
    try:
        return Address.parse(url.rstrip("/").removesuffix("/v1"))
    except ValueError:
        raise InvalidValueError("--url", url, "the URL of a server, such as http://127.0.0.1:1919") from None


def _first_model(address: Address, headers: dict[str, str]) -> str:
    """The name of the first model that the server lists."""
    host = f"[{address.host}]" if ":" in address.host else address.host
    url = f"{'https' if address.tls else 'http'}://{host}:{address.port}{address.path}/v1/models"
    try:
        response = httpx.get(url, headers=headers, timeout=30)
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, LookupError, TypeError, ValueError) as error:
        cause = " ".join(str(error).split()) or type(error).__name__
        raise MinisglError(
            f"{url} does not tell which models there are ({cause}). Is it right? Or give --model"
        ) from None


def _groups(count: int) -> str:
    return "all" if count == 1 else f"{count} groups"
