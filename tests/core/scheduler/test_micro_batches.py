"""Scheduling for several pipeline stages: micro-batches are even, and requests wait until their last token is known."""

from __future__ import annotations

from typing import Any

import pytest
import tiny

from minisgl_core.protocol.batch_plan import FROM_DEVICE, BatchPlan
from minisgl_core.runtime.engine_loop import EngineLoop
from minisgl_core.sampling_params import SamplingParams

PROMPTS = [[5, 9, 3, number] for number in range(10, 18)]


def watched(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[EngineLoop, list[BatchPlan], list[int]]:
    """Return a loop, the plans that it launches, and the number of steps in flight after each call of `step`."""
    loop, plans, left = tiny.new_loop(num_rows=9, num_pages=100, **options), [], []
    execute_model, step = loop.model_runner.execute_model, loop.step
    monkeypatch.setattr(
        loop.model_runner, "execute_model", lambda plan, *rest: (plans.append(plan), execute_model(plan))[1]
    )
    monkeypatch.setattr(loop, "step", lambda: (step(), left.append(len(loop._in_flight)))[0])
    return loop, plans, left


def generate(loop: EngineLoop, prompts: list[list[int]], max_tokens: int) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        tiny.submit(loop, str(number), prompt, sampling)
    found = tiny.run(loop)
    for number, prompt in enumerate(prompts):
        assert tuple(found[str(number)].tokens) == tiny.greedy(tuple(prompt), max_tokens)
    tiny.assert_nothing_in_use(loop)


@pytest.mark.parametrize(("pp", "overlap", "num_batches"), [(2, False, 2), (2, True, 3), (3, False, 3), (4, True, 5)])
def test_decodes_are_spread_evenly_over_micro_batches(
    pp: int, overlap: bool, num_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, plans, left = watched(monkeypatch, pp=pp, disable_overlap=not overlap)
    generate(loop, PROMPTS, 12)
    decodes = [plan.num_decodes for plan in plans if plan.num_decodes == plan.num_requests]
    most = -(-len(PROMPTS) // num_batches)
    assert max(decodes) == most
    assert decodes.count(most) > len(decodes) // 2
    assert max(left) == num_batches - 1


@pytest.mark.parametrize("pp", [2, 3])
def test_requests_wait_for_their_last_token(pp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only `--pp 1` reads unknown tokens on the device: no other stage than the last one has them."""
    loop, plans, _ = watched(monkeypatch, pp=pp, disable_overlap=False)
    generate(loop, PROMPTS[:3], 6)
    assert all((plan.token_ids != FROM_DEVICE).all() for plan in plans)
    loop, plans, _ = watched(monkeypatch, pp=1, disable_overlap=False)
    generate(loop, PROMPTS[:3], 6)
    assert any((plan.token_ids == FROM_DEVICE).any() for plan in plans)


def test_chunks_of_a_prompt_are_pipelined(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, plans, left = watched(monkeypatch, pp=3, disable_overlap=True, max_prefill_length=4)
    generate(loop, [list(range(3, 19))], 1)
    assert [plan.starts.tolist() for plan in plans] == [[0], [4], [8], [12]]
    assert left[:3] == [1, 2, 2]


def test_the_next_request_of_a_micro_batch_may_be_preempted() -> None:
    """The next request of the pipeline is the last one in the queue, so it loses its pages."""
    loop = tiny.new_loop(page_size=1, num_pages=49, cache="naive", pp=2, disable_overlap=True)
    sampling = SamplingParams(temperature=0.0, max_tokens=28, ignore_eos=True)
    prompts = {"deferred": list(range(3, 23)), "urgent": list(range(23, 43))}
    found: dict[str, tiny.Collected] = {}
    tiny.submit(loop, "deferred", prompts["deferred"], sampling, priority=1)
    tiny.step(loop, found)
    tiny.submit(loop, "urgent", prompts["urgent"], sampling, priority=0)
    tiny.run(loop, found)
    assert loop.scheduler.stats.num_preemptions > 0
    for name, prompt in prompts.items():
        assert tuple(found[name].tokens) == tiny.greedy(tuple(prompt), 28)
    tiny.assert_nothing_in_use(loop)
