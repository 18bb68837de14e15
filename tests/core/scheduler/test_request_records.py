"""The hook `request_finished` is called once per request, after its pages are freed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny

from minisgl_core.plugins.hooks import Hooks
from minisgl_core.plugins.hookspecs import EngineState, RequestRecord
from minisgl_core.runtime.worker import make_loop
from minisgl_core.sampling_params import SamplingParams


@pytest.mark.parametrize("overlap", [False, True])
def test_every_finished_request_is_reported_once(overlap: bool) -> None:
    built = tiny.built(page_size=4, num_pages=14)  # too few pages for four requests at once
    options = {"cache": "radix", "max_running_requests": 4, "disable_overlap": not overlap}
    records: list[RequestRecord] = []
    hooks = Hooks()

    def record(record: RequestRecord, state: EngineState) -> None:
        assert record.request_id not in loop.scheduler._by_id
        loop.scheduler.check()
        assert state.num_waiting + state.num_running <= 6 - len(records), "it does not count any more"
        assert 0 <= state.num_pages_used <= 13
        records.append(record)

    hooks.request_finished = record
    loop = make_loop(replace(built, config=built.config.with_flat(**options)), tiny.registry(), hooks, [])
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    for index in range(6):
        tiny.submit(loop, f"r{index}", (5 + index, 9, 3, 7, 11, 30, 31, 32, 33), sampling)
    loop.scheduler.abort("r5")
    collected: dict[str, tiny.Collected] = {}
    for _ in range(5):
        tiny.step(loop, collected)
    loop.scheduler.abort("r0")
    collected = tiny.run(loop, collected)
    by_id = {record.request_id: record for record in records}
    assert len(records) == len(by_id) == 6
    assert [by_id[f"r{index}"].finish_reason for index in range(6)] == ["abort", *["length"] * 4, "abort"]
    assert by_id["r5"].first_token_s is None
    assert sum(record.num_preemptions for record in records) == loop.scheduler.stats.num_preemptions > 0
    for name, one in by_id.items():
        assert (one.num_prompt_tokens, one.num_output_tokens) == (9, len(collected[name].tokens))
        assert one.num_cached_tokens == collected[name].outputs[-1].num_cached_tokens
        if one.first_token_s is not None:
            assert one.scheduled_s is not None
            assert one.arrival_s <= one.scheduled_s <= one.first_token_s <= one.finish_s
    assert loop.scheduler.num_pages_used == 0
