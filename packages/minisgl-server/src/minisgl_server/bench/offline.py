"""Runs ``minisgl bench offline``, with the engine in this process."""

from functools import partial
from types import SimpleNamespace

import click

from minisgl_core import LLM
from minisgl_core.config.options import EngineConfig
from minisgl_core.errors import InvalidValueError
from minisgl_core.utils.progress import progress_bar
from minisgl_core.weights.model_source import locate_model
from minisgl_server.bench import report
from minisgl_server.bench.engines import BenchEngine, MinisglEngine, TransformersEngine
from minisgl_server.bench.environment import print_results, write_json
from minisgl_server.bench.measure import MakeWorkload, Result, measure
from minisgl_server.bench.workloads import mixed, uniform


def run_offline(config: EngineConfig, options: SimpleNamespace) -> None:
    """Measure, print a table, and write the JSON file if one is given. `options` are the command's other flags."""
    with LLM(**config.flat()) as llm:
        workloads = _workloads(options, llm.info.vocab_size)
        _check_lengths(workloads, llm.info.max_seq_len, options)
        engines: list[BenchEngine] = [MinisglEngine(llm)]
        if options.compare:
            device = next(value for name, value, _ in llm.info.choices if name == "platform")
            path = locate_model(config.model)
            engines.append(TransformersEngine(path, llm.info.dtype, device, config.model.dummy_weight))
        results = _measure_all(workloads, engines, options.repeats)
        click.echo("\n".join(report.headline(llm.info)))
        data = report.as_json(results, llm.info)
        print_results(report.COLUMNS, data["results"])
        for note in report.notes(results):
            click.echo(note)
        write_json(options.json_file, **data, options=config.flat() | vars(options))


def _workloads(options: SimpleNamespace, vocab_size: int) -> list[MakeWorkload]:
    if options.workload == "W":
        return [partial(mixed, options.num_seqs, vocab_size)]
    shapes = [(size, options.input_len, options.output_len) for size in options.batch_sizes]
    if options.prefill_len:
        shapes.append((1, options.prefill_len, 1))
    return [partial(uniform, *shape, vocab_size) for shape in shapes]


def _check_lengths(workloads: list[MakeWorkload], max_seq_len: int, options: SimpleNamespace) -> None:
    for make in workloads:
        workload = make(0)
        if workload.longest > max_seq_len:
            allowed = f"at most the model's context of {max_seq_len} tokens; {workload.name} takes {workload.longest}"
            name = "--workload" if options.workload == "W" else "--input-len, --output-len and --prefill-len"
            raise InvalidValueError(name, workload.longest, allowed)


def _measure_all(workloads: list[MakeWorkload], engines: list[BenchEngine], repeats: int) -> list[list[Result]]:
    with progress_bar() as bar:
        task = bar.add_task("", total=len(workloads) * len(engines) * (1 + repeats), completed=-1)

        def advance(description: str) -> None:
            bar.update(task, description=description, advance=1)

        return [measure(make, engines, repeats, advance) for make in workloads]
