"""What a request may ask of sampling, out to the edges of the numbers that the engine computes with."""

from __future__ import annotations

import pytest
import tiny

from minisgl_core.errors import InvalidValueError
from minisgl_core.sampling_params import SamplingParams

INTEGERS = sorted({edge + more for edge in (-(2**63), -(2**31), 0, 2**31, 2**63, 10**400) for more in (-1, 0, 1)})
COUNTS = ("max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs", "prompt_logprobs")


def edges() -> list[dict[str, object]]:
    asked: list[dict[str, object]] = [{name: value} for name in COUNTS for value in INTEGERS]
    asked += [{"min_tokens": value, "max_tokens": value} for value in INTEGERS]
    asked += [{"stop_token_ids": (value,)} for value in INTEGERS]
    asked += [{"logit_bias": {value: 1.0}} for value in INTEGERS]
    return asked


@pytest.mark.filterwarnings("error")
def test_every_number_is_refused_by_its_name_or_served() -> None:
    loop = tiny.new_loop(page_size=4, num_pages=400)
    served: dict[str, SamplingParams] = {}
    refused: list[tuple[str, dict[str, object]]] = []
    for asked in edges():
        try:
            sampling = SamplingParams(**{"max_tokens": 3, "ignore_eos": True} | asked)  # type: ignore[arg-type]
            for each in sampling.split():
                name = f"r{len(served)}"
                tiny.submit(loop, name, (5, 9, 3), each)
                served[name] = each
        except InvalidValueError as error:
            refused.append((error.name, asked))
    assert all(name in asked for name, asked in refused)
    found = tiny.run(loop)
    for name, sampling in served.items():
        assert len(found[name].tokens) == sampling.max_tokens or found[name].finish_reason == "stop"
        assert all(0 <= token < tiny.VOCAB_SIZE for token in found[name].tokens)


@pytest.mark.parametrize("top_k", [tiny.VOCAB_SIZE, 2**31, 2**64])
def test_a_top_k_beyond_the_vocabulary_keeps_all_of_it(top_k: int) -> None:
    loop = tiny.new_loop(page_size=4, num_pages=400)
    for name, k in (("all", 0), ("many", top_k)):
        tiny.submit(loop, name, (5, 9, 3), SamplingParams(max_tokens=12, seed=3, top_k=k, ignore_eos=True))
    found = tiny.run(loop)
    assert found["many"].tokens == found["all"].tokens
