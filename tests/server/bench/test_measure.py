"""Statistics of a measurement, on engines with known times."""

from __future__ import annotations

from functools import partial

import pytest

from minisgl_server.bench.engines import Run
from minisgl_server.bench.offline import measure
from minisgl_server.bench.workloads import Workload, mixed, uniform


class FakeEngine:
    """Takes one second for the prompts and 10 ms times `slowness` per step, and records its arguments."""

    def __init__(self, name: str, log: list[tuple[str, Workload]], slowness: list[float]) -> None:
        self.name, self._log, self._slowness = name, log, slowness

    def run(self, workload: Workload) -> Run:
        self._log.append((self.name, workload))
        steps = max(workload.output_lens)
        slowness = self._slowness.pop(0) if steps > 1 else 0.0
        return Run(1.0 + 0.01 * slowness * (steps - 1), steps)


def test_uniform() -> None:
    log: list[tuple[str, Workload]] = []
    messages: list[str] = []
    engines = [FakeEngine("ours", log, [9, 1, 7, 2]), FakeEngine("theirs", log, [9, 4, 4, 4])]
    ours, theirs = measure(partial(uniform, 4, 20, 101, 5000), engines, 3, messages.append)
    assert (ours["engine"], theirs["engine"]) == ("ours", "theirs")
    assert [run["seconds"] for run in ours["runs"]] == pytest.approx([2.0, 8.0, 3.0]), "without the warm-up"
    assert ours["seconds"] == pytest.approx(3.0), "the median"
    assert ours["prefill_ms"] == pytest.approx(1000)
    assert ours["step_ms"] == pytest.approx(20)
    assert theirs["step_ms"] == pytest.approx(40)
    assert ours["output_tokens_per_s"] == pytest.approx(404 / 3)
    assert ours["total_tokens_per_s"] == pytest.approx(484 / 3)
    assert len(messages) == 2 * (1 + 3)
    full = [name for name, workload in log if workload.output_lens[0] == 101]
    assert full == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    for name in ("ours", "theirs"):
        prompts = [tuple(workload.prompts[0]) for engine, workload in log if engine == name]
        assert len(set(prompts)) == len(prompts) == 7, "a prompt came twice"


def test_outputs_of_one_token_are_only_prefill() -> None:
    [result] = measure(partial(uniform, 1, 1024, 1, 5000), [FakeEngine("ours", [], [])], 2)
    assert (result["prefill_ms"], result["seconds"]) == pytest.approx((1000, 1.0))
    assert result["step_ms"] is None


def test_mixed_lengths_have_no_separate_prefill() -> None:
    log: list[tuple[str, Workload]] = []
    [result] = measure(partial(mixed, 4, 20_000), [FakeEngine("ours", log, [1, 1, 1])], 2)
    steps = max(mixed(4, 20_000).output_lens)
    assert result["prefill_ms"] is None
    assert result["step_ms"] == pytest.approx(1000 * (1 + 0.01 * (steps - 1)) / steps)
    assert [max(workload.output_lens) for _, workload in log] == [64, steps, steps]
