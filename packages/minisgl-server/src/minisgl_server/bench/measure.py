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
    """Result of one engine on one workload; times are medians over the runs.

    Attributes:
        workload: variant 0.
        prefill_s: time for all prompts up to their first tokens; None for workloads with mixed output lengths.
    """

    engine: str
    workload: Workload
    runs: list[Run]
    prefill_s: float | None

    @property
    def seconds(self) -> float:
        """Time per run."""
        return median(run.seconds for run in self.runs)

    @property
    def output_tokens_per_s(self) -> float:
        return self.workload.num_output_tokens / self.seconds

    @property
    def total_tokens_per_s(self) -> float:
        return (self.workload.num_prompt_tokens + self.workload.num_output_tokens) / self.seconds

    @property
    def step_s(self) -> float | None:
        """Seconds per decode step; for mixed lengths, the mean over all steps, as prefill and decode share steps."""
        if self.prefill_s is None:
            return median(run.seconds / run.num_steps for run in self.runs)
        num_steps = max(self.workload.output_lens) - 1
        return (self.seconds - self.prefill_s) / num_steps if num_steps else None


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
    with_prefill = len(set(first.output_lens)) == 1
    runs: dict[str, list[Run]] = {engine.name: [] for engine in engines}
    prefills: dict[str, list[Run]] = {engine.name: [] for engine in engines}
    for engine in engines:
        advance(f"{first.name}: warming up {engine.name}")
        engine.run(make(2 * repeats).capped(WARM_UP_TOKENS))
    for repeat in range(repeats):
        for engine in engines if repeat % 2 == 0 else engines[::-1]:
            advance(f"{first.name}: {engine.name}, {repeat + 1} of {repeats}")
            runs[engine.name].append(engine.run(make(repeat)))
            if with_prefill and first.output_lens[0] > 1:
                prefills[engine.name].append(engine.run(make(repeats + repeat).capped(1)))
    results = []
    for engine in engines:
        prefill_runs = prefills[engine.name] or runs[engine.name]  # with one output token, a run is a prefill
        prefill_s = median(run.seconds for run in prefill_runs) if with_prefill else None
        results.append(Result(engine.name, first, runs[engine.name], prefill_s))
    return results
