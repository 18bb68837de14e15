"""Measures workloads on engines in alternation, so that other load on the machine affects all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from minisgl_server.bench.engines import BenchEngine, Run
from minisgl_server.bench.workloads import Workload

MakeWorkload = Callable[[int], Workload]
"""Returns the variant of a workload by number: equal shapes, different prompts."""
WARM_UP_TOKENS = 64
"""Maximum output tokens per request of a warm-up."""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one engine on one workload, as in the JSON file; times are medians over the runs.

    Attributes:
        seconds: time per run.
        step_ms: time per decode step; for mixed output lengths, the mean over all steps, as prefill and decode share steps. None
            with one output token.
        prefill_ms: time for all prompts up to their first tokens; None for mixed output lengths.
    """

    workload: str
    engine: str
    num_seqs: int
    num_prompt_tokens: int
    num_output_tokens: int
    temperature: float
    seconds: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    step_ms: float | None
    prefill_ms: float | None
    runs: list[Run]


def measure(
    make: MakeWorkload, engines: Sequence[BenchEngine], repeats: int, advance: Callable[[str], None] = lambda what: None
) -> list[Result]:
    """Warm up, then measure.

    Args:
        make: the workload; every run has a variant of its own.
        engines: engines to run, in this order in one repeat, and in the reverse order in the next.
        advance: called before the warm-up and each repeat of each engine, with a description.

    Returns:
        A result for each engine, in their order.
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


def _result(engine: str, workload: Workload, runs: list[Run], prefills: list[Run]) -> Result:
    seconds = median(run.seconds for run in runs)
    prefill_s = step_s = None
    if workload.has_equal_outputs:
        prefill_s = median(run.seconds for run in prefills or runs)  # with one output token, a run is a prefill
        num_steps = workload.output_lens[0] - 1
        step_s = (seconds - prefill_s) / num_steps if num_steps else None
    else:
        step_s = median(run.seconds / run.num_steps for run in runs)
    num_prompt_tokens, num_output_tokens = workload.num_prompt_tokens, workload.num_output_tokens
    return Result(
        workload=workload.name,
        engine=engine,
        num_seqs=len(workload.prompts),
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        temperature=workload.temperature,
        seconds=seconds,
        output_tokens_per_s=num_output_tokens / seconds,
        total_tokens_per_s=(num_prompt_tokens + num_output_tokens) / seconds,
        step_ms=None if step_s is None else 1e3 * step_s,
        prefill_ms=None if prefill_s is None else 1e3 * prefill_s,
        runs=runs,
    )
