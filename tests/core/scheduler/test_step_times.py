"""Estimates of step durations, and the limits of prompt tokens that they imply."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from minisgl_core.engine.step import ForwardOutput, PendingStep
from minisgl_core.protocol.batch_plan import BatchPlan
from minisgl_core.runtime.engine_loop import Outputs
from minisgl_core.sampling_params import SamplingParams
from minisgl_core.scheduler.step_times import FIRST_CHUNK, MIN_CHUNK, StepTimes


def device_s(num_decodes: int, num_prompt_tokens: int) -> float:
    """Return the duration of a step on a device that reads weights in 8 ms and multiplies a token in 45 us."""
    return 1e-5 * num_decodes + max(0.008, 45e-6 * (num_decodes + num_prompt_tokens))


def measured(max_step_s: float = 0.05) -> StepTimes:
    times = StepTimes(max_step_s)
    for num_decodes in range(33):
        times.observe(num_decodes, 0, device_s(num_decodes, 0))
        times.observe(num_decodes, 500, device_s(num_decodes, 500))
    return times


@given(st.integers(1, 32), st.integers(0, 8192))
def test_durations_of_similar_steps_are_predicted(num_decodes: int, num_prompt_tokens: int) -> None:
    predicted = measured().predict(num_decodes, num_prompt_tokens)
    assert predicted == pytest.approx(device_s(num_decodes, num_prompt_tokens), rel=0.02)


@given(st.integers(1, 32), st.integers(1, 8192), st.floats(0.01, 1.0))
def test_steps_are_limited_in_time_or_to_twice_their_decodes(num_decodes: int, most: int, max_step_s: float) -> None:
    tokens = measured(max_step_s).prompt_tokens(num_decodes, most)
    assert 1 <= tokens <= most
    longest = max(max_step_s, 2 * device_s(num_decodes, 0), device_s(num_decodes, MIN_CHUNK))
    assert device_s(num_decodes, tokens) <= 1.02 * longest
    assert tokens == most or device_s(num_decodes, tokens + 2) >= 0.98 * max_step_s, "the time is used"


def test_steps_without_decodes_or_without_a_limit_are_full() -> None:
    assert measured().prompt_tokens(0, 8192) == 8192
    assert measured(max_step_s=0.0).prompt_tokens(5, 8192) == 8192


def test_a_slow_first_step_is_forgotten() -> None:
    times = StepTimes(0.05)
    assert times.predict(4, 100) == 0, "unknown"
    assert times.prompt_tokens(4, 8192) == FIRST_CHUNK
    times.observe(0, 20, 5.0)
    times.observe(4, 0, 5.0)
    for _ in range(2):
        times.observe(4, 0, device_s(4, 0))
        times.observe(4, FIRST_CHUNK, device_s(4, FIRST_CHUNK))
    assert device_s(4, 100) < times.predict(4, 100) < 2 * device_s(4, 100), "small steps show an upper bound"
    for _ in range(5):
        size = times.prompt_tokens(4, 8192)
        times.observe(4, size, device_s(4, size))
    assert times.predict(4, 500) == pytest.approx(device_s(4, 500), rel=0.02)


def test_slow_tokens_leave_small_chunks() -> None:
    """Attention takes 10 ms per prompt token, as after a long context on a CPU."""
    times = StepTimes(0.1)
    for _ in range(5):
        times.observe(1, 0, 0.009)
        times.observe(1, FIRST_CHUNK, 0.65)
    assert times.prompt_tokens(1, 8192) == MIN_CHUNK < FIRST_CHUNK


def test_upper_bounds_do_not_raise_estimates() -> None:
    times = measured()
    for _ in range(5):
        times.observe(8, 0, 0.02, is_upper_bound=True)
        times.observe(8, 500, 0.05, is_upper_bound=True)
    assert times.predict(8, 0) == pytest.approx(device_s(8, 0), rel=0.02)
    assert times.predict(8, 500) == pytest.approx(device_s(8, 500), rel=0.02)
    times = StepTimes()
    times.observe(8, 500, 0.05, is_upper_bound=True)
    assert times.predict(8, 500) == pytest.approx(0.05), "better than nothing"


def test_chunks_do_not_shrink_while_launches_are_slow() -> None:
    """The host takes 0.3 s per launch. Small chunks would take as long as large ones, and prompts would queue up."""
    times, draw = measured(), np.random.default_rng(3)

    def run(num_steps: int, launch_s: float) -> list[int]:
        sizes = []
        for _ in range(num_steps):
            sizes.append(times.prompt_tokens(20, 8192))
            seconds = max(device_s(20, sizes[-1]), launch_s) * draw.uniform(0.8, 1.2)
            times.observe(20, sizes[-1], seconds, min(launch_s, seconds))
        return sizes

    before, slow, after = run(40, 0.01), run(60, 0.3), run(40, 0.01)
    assert min(before) > 700
    assert min(slow[1:]) > 5000, "the device would wait"
    assert all(device_s(20, size) < 0.06 for size in after[1:]), "the limit holds again"


def test_chunks_shrink_with_the_context() -> None:
    """The time per prompt token grows with the number of tokens before it."""
    times, before = measured(), 0
    while before < 100_000:
        size = times.prompt_tokens(20, 8192)
        seconds = device_s(20, size) + 2e-9 * size * before
        assert seconds < 0.06
        times.observe(20, size, seconds, 0.01)
        before += size


def test_short_prompts_with_slow_launches_are_measured() -> None:
    times = StepTimes(0.05)
    for _ in range(5):
        times.observe(1, 100, 0.012, 0.01)
    assert times.prompt_tokens(1, 8192) > 400


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, tiny.VOCAB_SIZE, length).tolist())


class Constant(StepTimes):
    """Estimates the same time for all decode steps and 0.1 ms per token, whatever it observes."""

    def __init__(self, max_step_s: float, decode_s: float = 0.008) -> None:
        super().__init__(max_step_s)
        for group in range(32):
            self._decode_s[group].append(decode_s)
        self._token_s.append(1e-4)

    def observe(self, *arguments: Any, **options: Any) -> None:
        pass


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_with_decodes_keep_the_time_limit(overlap: bool) -> None:
    loop = tiny.new_loop(
        page_size=4,
        num_pages=400,
        max_prefill_length=1000,
        cache="naive",
        disable_overlap=not overlap,
        max_seq_len_override=512,
    )
    loop.scheduler.step_times = Constant(max_step_s=0.01015, decode_s=0.001)
    steps: list[tuple[int, list[tuple[str, int]]]] = []

    def record(plan: BatchPlan) -> None:
        requests, n = loop.scheduler._running, plan.num_decodes
        prompts = zip(plan.rows[n:].tolist(), plan.num_new[n:].tolist(), strict=True)
        steps.append((n, [(requests[row].request_id, num_new) for row, num_new in prompts]))

    loop.scheduler.step_planned = record
    tiny.submit(loop, "stream", prompt(99, 5), greedy(200))
    collected: dict[str, tiny.Collected] = {}
    while "stream" not in collected:
        tiny.step(loop, collected)
    rounds = [{"a": 60, "b": 30, "c": 20}, {"d": 10, "e": 60, "f": 250}, {"g": 30, "h": 80, "i": 30, "j": 5}]
    lengths: dict[str, int] = {}
    for waiting in rounds:
        for name, length in waiting.items():
            tiny.submit(loop, name, prompt(len(lengths), length), greedy(3))
            lengths[name] = length
        while loop.scheduler.num_waiting or loop.scheduler.num_running > 1:
            tiny.step(loop, collected)
    with_prompts = [chunks for num_decodes, chunks in steps if num_decodes and chunks]
    assert with_prompts == [
        [("a", 60)],  # with the whole prompt of b, more than half of the tokens
        [("b", 30), ("c", 20)],
        [("d", 10)],
        [("e", 60)],
        [("f", 98)],  # 101 tokens take 10.1 ms, and three of them are decodes
        [("f", 99)],
        [("f", 53)],
        [("g", 30), ("h", 70)],  # more requests wait; h starts after less than half of the tokens
        [("h", 10), ("i", 30), ("j", 5)],
    ]
    for seed, (name, length) in enumerate(lengths.items()):
        assert tuple(collected[name].tokens) == tiny.greedy(prompt(seed, length), 3)


def test_steps_are_scheduled_shortly_before_the_previous_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = tiny.new_loop(page_size=4, num_pages=100, disable_overlap=False)
    loop.scheduler.step_times = Constant(max_step_s=0.0)
    assert loop.time_to_schedule() == 0, "nothing runs"
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    tiny.submit(loop, "a", prompt(1, 5), greedy(20))
    loop.step()
    loop.step()
    assert loop.time_to_schedule() == 0, "the step is done"
    monkeypatch.setattr(PendingStep, "is_done", lambda self: False)
    loop._last_done_s, loop._in_flight[0].done_s = now, 0.0
    assert 0 < loop.time_to_schedule() <= 1e-3
    now += 0.0064
    assert loop.time_to_schedule() == pytest.approx(0.0006)
    now += 0.0006
    assert loop.time_to_schedule() == 0, "the next step must be launched before this one ends"
    sequential = tiny.new_loop(page_size=4, num_pages=100, disable_overlap=True)
    sequential.scheduler.step_times = Constant(max_step_s=0.0)
    tiny.submit(sequential, "a", prompt(1, 5), greedy(20))
    sequential.step()
    assert sequential.time_to_schedule() == 0


def test_steps_with_slow_launches_are_scheduled_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = tiny.new_loop(page_size=4, num_pages=100, disable_overlap=False, max_seq_len_override=200)
    loop.scheduler.step_times = Constant(max_step_s=0.0)
    now, execute_model = time.monotonic(), loop.model_runner.execute_model

    def slow_execute_model(plan: BatchPlan, *rest: None) -> ForwardOutput:
        nonlocal now
        now += 0.004 if plan.num_tokens == plan.num_decodes else 0.009
        return execute_model(plan)

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(PendingStep, "is_done", lambda self: False)
    monkeypatch.setattr(loop.model_runner, "execute_model", slow_execute_model)
    tiny.submit(loop, "a", prompt(1, 5), greedy(20))
    loop.step()
    loop.step()  # its decode runs for 8 ms from now
    now += 0.002
    assert loop.time_to_schedule() > 0
    now += 0.0011
    assert loop.time_to_schedule() == 0, "CPU scheduling and launch take 4 ms, and the device must not wait for them"
    tiny.submit(loop, "b", prompt(2, 119), greedy(5))
    loop._last_done_s = now
    loop.step()  # its decode and 119 prompt tokens run for 12 ms from now
    loop._last_done_s = now
    now += 0.006
    assert loop.time_to_schedule() > 0, (
        "the launch of a step with prompts takes 9 ms, but its first kernels run by then"
    )
    now += 0.0011
    assert loop.time_to_schedule() == 0


class Progress:
    """Event of a step's layers that is done once `is_done` is set."""

    is_done = False

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        raise AssertionError("the host must not wait for it")


@pytest.mark.parametrize("reached_at", [0.002, 0.009, 0.02])
def test_the_end_of_a_step_is_expected_from_its_progress(reached_at: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 12 ms reaches three quarters of its layers after 2, 9 or 20 ms."""
    loop = tiny.new_loop(page_size=4, num_pages=100, disable_overlap=False, max_seq_len_override=200)
    loop.scheduler.step_times = Constant(max_step_s=0.0)
    begin = now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(PendingStep, "is_done", lambda self: False)
    tiny.submit(loop, "a", prompt(1, 120), greedy(5))
    loop.step()
    [step] = loop._in_flight
    step.progress = progress = Progress()
    while (wait_s := loop.time_to_schedule()) > 0:
        assert wait_s <= 1e-3
        now += wait_s
        progress.is_done = now - begin >= reached_at
    assert now - begin == pytest.approx(reached_at + 0.003 - 0.001, abs=1.1e-3), "at most one check late"
    assert loop._predict_done(step) == pytest.approx(reached_at + begin + 0.003, abs=1.1e-3)


def test_an_end_between_the_launches_of_layers_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step takes 12 ms instead of 8, and the launch of prompts 20 ms without the delivery of its token."""
    loop = tiny.new_loop(page_size=4, num_pages=100, disable_overlap=False)
    loop.scheduler.step_times = Constant(max_step_s=0.0)
    now, done, execute_model = time.monotonic(), list[PendingStep](), loop.model_runner.execute_model

    def slow_execute_model(plan: BatchPlan, between_layers: Callable[[], None]) -> ForwardOutput:
        nonlocal now
        between_layers()
        now += 0.012
        done.append(loop._in_flight[0].pending)
        between_layers()
        between_layers()
        now += 0.008
        return execute_model(plan)

    def deliver(outputs: Outputs) -> None:
        nonlocal now
        delivered.append(loop._last_done_s)
        now += 0.003

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(PendingStep, "is_done", lambda self: self in done)
    tiny.submit(loop, "a", prompt(1, 5), greedy(20))
    loop.step()
    loop.step()
    began, delivered = now, list[float]()
    monkeypatch.setattr(loop.model_runner, "execute_model", slow_execute_model)
    loop._deliver = deliver
    tiny.submit(loop, "b", prompt(2, 30), greedy(5))
    loop.step()
    assert delivered == [began + 0.012]
    [launched] = loop._in_flight
    assert launched.launch_s == pytest.approx(0.02)
    done.clear()
    loop.step()  # only decodes
    assert loop._host_s == pytest.approx(0.02)


def test_an_unnoticed_end_is_assumed_when_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step ends while the host launches prompts, and its result is read after that."""
    loop = tiny.new_loop(page_size=4, num_pages=100, disable_overlap=False)
    loop.scheduler.step_times = Constant(max_step_s=0.0)
    now, done, execute_model = time.monotonic(), list[PendingStep](), loop.model_runner.execute_model

    def slow_execute_model(plan: BatchPlan, *rest: None) -> ForwardOutput:
        nonlocal now
        now += 0.02
        return execute_model(plan)

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(PendingStep, "is_done", lambda self: self in done)
    tiny.submit(loop, "a", prompt(1, 5), greedy(20))
    loop.step()
    loop.step()
    began = loop._last_done_s = now
    monkeypatch.setattr(loop.model_runner, "execute_model", slow_execute_model)
    tiny.submit(loop, "b", prompt(2, 30), greedy(5))
    done.append(loop._in_flight[0].pending)
    loop.step()
    assert loop._last_done_s == pytest.approx(began + 0.008, abs=1e-4)
    loop.step()
    assert loop._last_done_s == now, "the host has waited for the result"
