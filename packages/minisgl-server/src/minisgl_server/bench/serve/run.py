"""Runs ``minisgl bench serve``, from its options to the report."""

import asyncio
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from rich.progress import Progress, TaskID

from minisgl_core.config.options import ModelOptions
from minisgl_core.contracts.weights import WeightSource
from minisgl_core.errors import InvalidValueError, ModelFormatError
from minisgl_core.plugins.registry import Registry
from minisgl_core.utils.progress import progress_bar
from minisgl_core.weights.model_source import locate_model, open_weights
from minisgl_server.bench.environment import write_json
from minisgl_server.bench.serve import plot
from minisgl_server.bench.serve.conversations import (
    Conversation,
    arrivals,
    limited,
    random_conversations,
    trace_conversations,
)
from minisgl_server.bench.serve.cpu import ServerCpuTimer, local_server_pid
from minisgl_server.bench.serve.http_client import HttpClient
from minisgl_server.bench.serve.load import Outcome, run_load
from minisgl_server.bench.serve.options import Run, runs
from minisgl_server.bench.serve.prompts import COMMON_WORDS, Prompts, chats_of
from minisgl_server.bench.serve.report import Measured, as_json, print_report
from minisgl_server.bench.serve.request import ApiClient
from minisgl_server.bench.serve.summary import summarize
from minisgl_server.bench.trace.format import read_trace
from minisgl_server.remote_server import authorization, first_model, server_url

INTERRUPTED_STATUS = 130
WARM_UP_TOKENS = 8
"""Maximum output tokens per request of the warm-up."""
WARM_UP = Run(-1, math.inf, 1, None)
"""Parameters of the warm-up run, whose prompts no measured run has."""

if sys.platform == "win32":
    new_event_loop = asyncio.new_event_loop
else:
    from uvloop import new_event_loop


def run_serve(options: SimpleNamespace) -> None:
    """Measure, print tables, and write the requested files.

    The exit status is 130 if the user interrupted the run, and 1 if no request was completed.
    """
    draw = None if options.plot is None else plot.make_plotter(Path(options.plot))
    url = server_url(options.url)
    headers = authorization(options.api_key)
    prompts = _prompts(options)
    workload = _trace_workload(options, prompts) if options.trace is not None else _random_workload(options, prompts)
    model = options.model or first_model(url, headers, "Otherwise, give --model.")["id"]
    extra = {"temperature": options.temperature, **options.extra_body}
    http = HttpClient(url, headers)
    client = ApiClient(http, options.endpoint, model, options.ignore_eos, extra, options.timeout)
    measured: list[Measured] = []
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_measure(options, client, prompts, workload, measured))

    print_report(options, model, workload.note, measured)
    write_json(options.json_file, **as_json(options, model, workload.note, measured))
    if draw is not None:
        draw(measured)
    if not measured or measured[-1].outcome.is_interrupted:
        sys.exit(INTERRUPTED_STATUS)
    if not any(each.outcome.completed for each in measured):
        sys.exit(1)


class _Workload(NamedTuple):
    """Conversations of a run, with their number of requests and a description."""

    conversations: Callable[[Run], Iterator[Conversation]]
    num_requests: int | None
    note: str


def _trace_workload(options: SimpleNamespace, prompts: Prompts) -> _Workload:
    all_requests = read_trace(Path(options.trace), options.num_requests)
    longest = options.max_input_len or math.inf
    requests = [request for request in all_requests if request.input_length <= longest]
    if not requests:
        shortest = min(request.input_length for request in all_requests)
        raise InvalidValueError("--max-input-len", longest, f"at least {shortest}, the shortest of the trace")
    num_skipped = len(all_requests) - len(requests)
    note = f"{len(requests)} requests of {options.trace}"
    note += f"; {num_skipped} of more than {longest} tokens were skipped" if num_skipped else ""

    def conversations(run: Run) -> Iterator[Conversation]:
        scale, template = run.time_scale or 1.0, prompts.num_template_tokens.get(0, 0)
        return trace_conversations(requests, scale, prompts.num_content_ids, template, options.seed, 1 + run.number)

    return _Workload(conversations, len(requests), note)


def _random_workload(options: SimpleNamespace, prompts: Prompts) -> _Workload:
    def conversations(run: Run) -> Iterator[Conversation]:
        times = arrivals(run.request_rate, options.burstiness, options.seed)
        endless = random_conversations(options, times, prompts.num_content_ids, 1 + run.number)
        return limited(endless, options.num_requests)

    note = f"random, {_length(*options.input_len)} input and {_length(*options.output_len)} output tokens"
    note += f", {options.num_turns} turns" if options.num_turns > 1 else ""
    if options.shared_prefix_tokens:
        groups = "all" if options.num_prefixes == 1 else f"{options.num_prefixes} groups"
        note += f", after a prefix of {options.shared_prefix_tokens} shared by {groups}"
    return _Workload(conversations, options.num_requests, note)


def _length(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}:{high}"


async def _measure(
    options: SimpleNamespace, client: ApiClient, prompts: Prompts, workload: _Workload, measured: list[Measured]
) -> None:
    """Warm up, then append each run to `measured`."""
    pids = options.server_pids or tuple(filter(None, [local_server_pid(client.http.url)]))
    try:
        warm_up = _warm_up(workload, options.num_warmups)
        if (await run_load(client, prompts, warm_up, max_concurrency=1)).is_interrupted:
            return
        for run in runs(options):
            with progress_bar() as bar:
                task = bar.add_task(run.label, total=workload.num_requests)
                show = partial(_show, bar, task, run.label)
                limits = run.max_concurrency or sys.maxsize, options.duration or math.inf
                server = ServerCpuTimer(pids)
                outcome = await run_load(client, prompts, workload.conversations(run), *limits, show)
            summary = summarize(outcome, options.goodput, options.ignore_eos, server.seconds())
            measured.append(Measured(run, outcome, summary))
            if outcome.is_interrupted:
                return
    finally:
        client.http.close()


def _show(bar: Progress, task: TaskID, label: str, outcome: Outcome) -> None:
    num_running = len(outcome.records) - outcome.num_ended
    description = f"{label}: {num_running} running, {outcome.num_failed} failed"
    bar.update(task, completed=outcome.num_ended, description=description)


def _warm_up(workload: _Workload, num_requests: int) -> Iterator[Conversation]:
    """Yield conversations with short outputs, and with prompts that no measured run has."""
    for each in limited(workload.conversations(WARM_UP), num_requests):
        turns = [turn.capped(WARM_UP_TOKENS) for turn in each.turns]
        yield Conversation(each.number, 0.0, each.prefix, turns)


def _prompts(options: SimpleNamespace) -> Prompts:
    if options.tokenizer is None:
        words = COMMON_WORDS.split() if options.endpoint == "chat" else []
        return Prompts(len(words) or options.vocab_size, words)
    path = locate_model(ModelOptions(model=options.tokenizer), "--tokenizer")
    tokenizer = _open_model(path).tokenizer()
    if options.endpoint == "completions":
        return Prompts(len(tokenizer))
    if tokenizer.chat_template is None:
        raise InvalidValueError("--tokenizer", options.tokenizer, "one with a chat template, for --endpoint chat")
    return chats_of(tokenizer)


def _open_model(path: Path) -> WeightSource:
    """Open a checkpoint for its tokenizer. A folder may lack the weights."""
    registry = Registry.from_environment()
    try:
        return open_weights(path, registry)
    except ModelFormatError:
        if registry.unsupported("weights", "dummy", path):
            raise
        return open_weights(path, registry, dummy=True)
