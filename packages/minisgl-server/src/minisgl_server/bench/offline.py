"""Runs ``minisgl bench offline``, with the engine in this process.

Engines are measured in alternation, so that other load on the machine affects all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import click
import torch

from minisgl_core import LLM
from minisgl_core.config.options import EngineConfig
from minisgl_core.errors import InvalidValueError
from minisgl_core.protocol.messages import EngineInfo
from minisgl_core.utils.progress import progress_bar
from minisgl_core.weights.model_source import locate_model
from minisgl_server.bench.engines import BenchEngine, MinisglEngine, Run, TransformersEngine
from minisgl_server.bench.environment import hardware, print_results, versions, write_json
from minisgl_server.bench.workloads import Workload, mixed, uniform

MakeWorkload = Callable[[int], Workload]
"""Returns the variant of a workload by number: equal shapes, different prompts."""
WARM_UP_TOKENS = 64
"""Maximum output tokens per request of a warm-up."""
COLUMNS = (
    ("workload", "{workload}"),
    ("engine", "{engine}"),
    ("seconds", "{seconds:.3f}"),
    ("output tok/s", "{output_tokens_per_s:,.1f}"),
    ("total tok/s", "{total_tokens_per_s:,.1f}"),
    ("step ms", "{step_ms:.2f}"),
    ("prefill ms", "{prefill_ms:.2f}"),
)
COMPARISON = "{workload}: minisgl is {speed_up:.2f} times as fast as {with} ({time_ratio:.2f} of its time)"


def run_offline(config: EngineConfig, options: SimpleNamespace) -> None:
    """Measure, print a table, and write the JSON file if one is given. `options` are the command's other flags."""
    with LLM(**config.flat()) as llm:
        workloads = _workloads(options, llm.info)
        engines: list[BenchEngine] = [MinisglEngine(llm)]
        if options.compare:
            device = next(value for name, value, _ in llm.info.choices if name == "platform")
            path = locate_model(config.model)
            engines.append(TransformersEngine(path, llm.info.dtype, device, config.model.dummy_weight))
        with progress_bar() as bar:
            task = bar.add_task("", total=len(workloads) * len(engines) * (1 + options.repeats), completed=-1)
            advance = partial(bar.update, task, advance=1)
            groups = [
                measure(make, engines, options.repeats, lambda text: advance(description=text)) for make in workloads
            ]
        about = _about(llm.info)
        _print_about(about)
        results = [result for group in groups for result in group]
        print_results(COLUMNS, results)
        comparisons = [_compare(minisgl, other) for minisgl, *others in groups for other in others]
        for each in comparisons:
            click.echo(COMPARISON.format_map(each))
        for minisgl, *_ in groups:
            if cached := max(run["num_cached_tokens"] for run in minisgl["runs"]):
                share = cached / minisgl["num_prompt_tokens"]
                click.echo(
                    f"{minisgl['workload']}: up to {share:.2%} of the prompts' tokens came from the prefix cache"
                )
        settings = config.flat() | vars(options)
        write_json(options.json_file, **about, results=results, comparisons=comparisons, options=settings)


def _workloads(options: SimpleNamespace, info: EngineInfo) -> list[MakeWorkload]:
    """Return the workloads, which fit the model's context."""
    flags = "--workload"
    workloads: list[MakeWorkload] = [partial(mixed, options.num_seqs, info.vocab_size)]
    if options.workload != "W":
        flags = "--input-len, --output-len and --prefill-len"
        shapes = [(size, options.input_len, options.output_len) for size in options.batch_sizes]
        if options.prefill_len:
            shapes.append((1, options.prefill_len, 1))
        workloads = [partial(uniform, *shape, info.vocab_size) for shape in shapes]
    for workload in (make(0) for make in workloads):
        if (longest := workload.longest) > info.max_seq_len:
            allowed = f"at most the model's context of {info.max_seq_len} tokens; {workload.name} takes {longest}"
            raise InvalidValueError(flags, longest, allowed)
    return workloads


def measure(
    make: MakeWorkload, engines: Sequence[BenchEngine], repeats: int, advance: Callable[[str], None] = lambda what: None
) -> list[dict[str, Any]]:
    """Warm up, then measure. Return the result of each engine. Every run has a variant of the workload of its own.

    Engines run in this order in one repeat, and in the reverse order in the next. `advance` is called before the warm-up and
    each repeat of each engine, with a description.
    """
    first = make(0)
    runs: dict[str, list[Run]] = {engine.name: [] for engine in engines}
    prefills: dict[str, list[Run]] = {engine.name: [] for engine in engines}
    # The measured runs have the first `repeats` variants, the prefills the next ones, and the warm-up the one after these.
    for engine in engines:
        advance(f"{first.name}: warming up {engine.name}")
        engine.run(make(2 * repeats).capped(WARM_UP_TOKENS))
    for repeat in range(repeats):
        for engine in engines if repeat % 2 == 0 else engines[::-1]:
            advance(f"{first.name}: {engine.name}, {repeat + 1} of {repeats}")
            runs[engine.name].append(engine.run(make(repeat)))
            if first.has_equal_outputs and first.output_lens[0] > 1:
                prefills[engine.name].append(engine.run(make(repeats + repeat).capped(1)))
    return [_result(engine.name, first, runs[engine.name], prefills[engine.name]) for engine in engines]


def _result(engine: str, workload: Workload, runs: list[Run], prefills: list[Run]) -> dict[str, Any]:
    """Return the result of one engine, as in the JSON file. Times are medians over the runs.

    Returns:
        step_ms: time per decode step; for mixed output lengths, the mean over all steps, as prefill and decode share steps. None
            with one output token.
        prefill_ms: time for all prompts up to their first tokens; None for mixed output lengths.
        runs: the fields of each `Run`.
    """
    seconds = median(run.seconds for run in runs)
    prefill_ms = step_ms = None
    if workload.has_equal_outputs:
        prefill_ms = 1e3 * median(run.seconds for run in prefills or runs)  # with one output token, a run is a prefill
        num_steps = workload.output_lens[0] - 1
        step_ms = (1e3 * seconds - prefill_ms) / num_steps if num_steps else None
    else:
        step_ms = 1e3 * median(run.seconds / run.num_steps for run in runs)
    num_prompt_tokens, num_output_tokens = workload.num_prompt_tokens, workload.num_output_tokens
    return {
        "workload": workload.name,
        "engine": engine,
        "num_seqs": len(workload.prompts),
        "num_prompt_tokens": num_prompt_tokens,
        "num_output_tokens": num_output_tokens,
        "temperature": workload.temperature,
        "seconds": seconds,
        "output_tokens_per_s": num_output_tokens / seconds,
        "total_tokens_per_s": (num_prompt_tokens + num_output_tokens) / seconds,
        "step_ms": step_ms,
        "prefill_ms": prefill_ms,
        "runs": [asdict(run) for run in runs],
    }


def _about(info: EngineInfo) -> dict[str, Any]:
    """Return the machine, versions, model and providers of a measurement, for the JSON file."""
    machine = hardware() | {"num_threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        machine |= {"gpu": info.device, "num_gpus": torch.cuda.device_count()}
    return {
        "machine": machine,
        "versions": versions() | ({"cuda": torch.version.cuda} if torch.version.cuda else {}),
        "model": {"name": info.model, "architecture": info.architecture, "dtype": info.dtype},
        "choices": {name: {"value": value, "reason": reason} for name, value, reason in info.choices},
    }


def _print_about(about: dict[str, Any]) -> None:
    machine, model = about["machine"], about["model"]
    device = "{num_gpus} x {gpu}, ".format_map(machine) if "gpu" in machine else ""
    cpu = "{cpu}, {num_usable_cpus} CPUs, {num_threads} threads, {memory_gib} GiB".format_map(machine)
    chosen = ((name, each["value"]) for name, each in about["choices"].items() if name not in ("platform", "dtype"))
    packages = (each for each in about["versions"].items() if each[0] != "minisgl-server")
    click.echo(f"model    {model['name']} ({model['architecture']}, {model['dtype']})")
    click.echo(f"machine  {device}{cpu}")
    click.echo(f"engine   {', '.join(map(' '.join, chosen))}")
    click.echo(f"versions {', '.join(map(' '.join, packages))}\n")


def _compare(minisgl: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    speed_up = other["seconds"] / minisgl["seconds"]
    return {"workload": minisgl["workload"], "with": other["engine"], "speed_up": speed_up, "time_ratio": 1 / speed_up}
