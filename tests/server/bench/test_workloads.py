from __future__ import annotations

import pytest

from minisgl_server.bench.workloads import mixed, uniform


def test_workload_w_equals_the_published_one() -> None:
    workload = mixed(256, vocab_size=150_000)
    assert (workload.num_prompt_tokens, workload.num_output_tokens) == (142_827, 133_966)
    assert len(workload.prompts) == 256
    assert all(100 <= len(prompt) <= 1024 for prompt in workload.prompts)
    assert all(100 <= length <= 1024 for length in workload.output_lens)
    assert max(map(max, workload.prompts)) <= 10_000
    assert workload.temperature == 0.6
    assert workload.longest <= 2048


def test_variants_of_w_differ_only_in_tokens() -> None:
    first, second = mixed(8, 20_000), mixed(8, 20_000, variant=1)
    assert first.output_lens == second.output_lens
    for one, other in zip(first.prompts, second.prompts, strict=True):
        assert len(one) == len(other)
        assert all(a != b for a, b in zip(one, other, strict=True))
    assert max(map(max, mixed(8, 61).prompts)) < 61


@pytest.mark.parametrize("batch_size", [1, 16])
def test_uniform_prompts_share_no_prefix(batch_size: int) -> None:
    variants = [uniform(batch_size, 20, 7, 1000, variant) for variant in range(9)]
    for workload in variants:
        assert [len(prompt) for prompt in workload.prompts] == [20] * batch_size
        assert (workload.num_prompt_tokens, workload.num_output_tokens) == (20 * batch_size, 7 * batch_size)
    prompts = [prompt for workload in variants for prompt in workload.prompts]
    assert len({prompt[0] for prompt in prompts}) == len(prompts)
    assert {token for prompt in prompts for token in prompt} <= set(range(1000))
    assert uniform(batch_size, 20, 7, 1000, 3) == variants[3], "a variant is always the same"


def test_capped() -> None:
    workload = mixed(8, 20_000)
    capped = workload.capped(150)
    assert capped.prompts == workload.prompts
    assert capped.output_lens == [min(length, 150) for length in workload.output_lens]
