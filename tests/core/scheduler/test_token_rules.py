"""Allowed tokens and bad words, compared with transformers' logits processors."""

from __future__ import annotations

import timeit
import tracemalloc
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_core.errors import InvalidValueError
from minisgl_core.protocol.messages import Submit, decoder, encode
from minisgl_core.sampling_params import MAX_BAD_WORDS, SamplingParams
from minisgl_core.scheduler.token_rules import TokenRules

PROMPTS = [(5, 9, 3), (30,), (44, 44, 44, 7)]
token = st.integers(3, tiny.VOCAB_SIZE - 1)


def reference(prompt: tuple[int, ...], num_tokens: int, bad_words: list[list[int]], allowed: list[int] | None) -> Any:
    """Return greedy tokens of transformers with its processors, which see the output only."""
    from transformers import NoBadWordsLogitsProcessor, SuppressTokensLogitsProcessor

    output: list[int] = []
    for _ in range(num_tokens):
        with torch.inference_mode():
            scores = tiny.reference_model()(torch.tensor([[*prompt, *output]])).logits[:, -1]
        if bad_words:
            processor = NoBadWordsLogitsProcessor(bad_words, eos_token_id=None)
            # At least as long as each sequence, as the processor expects; no sequence has the padding.
            padded = torch.tensor([[0] * 8 + output])
            scores = processor(padded, scores)
        if allowed is not None:
            others = [each for each in range(tiny.VOCAB_SIZE) if each not in allowed]
            scores = SuppressTokensLogitsProcessor(others)(torch.tensor([[0]]), scores)
        output.append(int(scores.argmax()))
    return output


def submit(loop: Any, name: str, prompt: tuple[int, ...], bad_words: list[list[int]], **sampling: Any) -> None:
    params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 10, **sampling})
    ids = np.array(prompt, np.int32)
    loop.scheduler.submit(Submit(request_id=name, token_ids=ids, sampling=params, bad_words=bad_words))


@pytest.mark.parametrize("options", [{}, {"disable_overlap": True}, {"num_pages": 10}], ids=str)
def test_tokens_in_a_batch_equal_transformers(options: dict[str, Any]) -> None:
    """Requests without rules run beside them, with and without overlap and preemption."""
    loop = tiny.new_loop(**{"page_size": 4, "num_pages": 60, **options})
    free = {prompt: list(tiny.greedy(prompt, 10)) for prompt in PROMPTS}
    cases: dict[str, tuple[tuple[int, ...], list[list[int]], list[int] | None]] = {}
    for i, prompt in enumerate(PROMPTS):
        output = free[prompt]
        cases[f"free {i}"] = prompt, [], None
        cases[f"one {i}"] = prompt, [output[:1], output[3:4]], None
        cases[f"several {i}"] = prompt, [output[:2], output[2:5], output[1:3]], None
        cases[f"allowed {i}"] = prompt, [], [output[4], 7, 11, 13]
        cases[f"both {i}"] = prompt, [[7, 7], [7, 11], output[4:5]], [output[4], 7, 11, 13]
    for name, (prompt, bad_words, allowed) in cases.items():
        submit(loop, name, prompt, bad_words, allowed_token_ids=allowed)
    found = tiny.run(loop)
    for name, (prompt, bad_words, allowed) in cases.items():
        assert found[name].tokens == reference(prompt, 10, bad_words, allowed), name
        assert name.startswith("free") == (found[name].tokens == free[prompt]), name
    assert (loop.scheduler.stats.num_preemptions > 0) == ("num_pages" in options)
    tiny.assert_nothing_in_use(loop)


def test_sampled_tokens_follow_the_rules() -> None:
    loop = tiny.new_loop(page_size=4, num_pages=400)
    allowed = tuple(range(10, 20))
    for i in range(12):
        rules = {"allowed_token_ids": allowed, "temperature": 5.0, "seed": i, "max_tokens": 20, "top_k": 40}
        submit(loop, f"r{i}", (5, 9, i + 3), [[10], [11, 12], [13, 14, 15]], **rules)
    for name, each in tiny.run(loop).items():
        assert set(each.tokens) <= set(allowed) - {10}, name
        pairs = list(zip(each.tokens, each.tokens[1:], strict=False))
        assert (11, 12) not in pairs
        assert (13, 14, 15) not in list(zip(each.tokens, each.tokens[1:], each.tokens[2:], strict=False))


@settings(max_examples=200)
@given(st.lists(st.lists(token, min_size=1, max_size=4), max_size=8), st.lists(token, max_size=8))
def test_tokens_that_complete_a_bad_word_are_banned(bad_words: list[list[int]], output: list[int]) -> None:
    one = Submit(request_id="r", token_ids=np.array([5], np.int32), sampling=SamplingParams(), bad_words=bad_words)
    rules = TokenRules.of(one)
    expected = {each[-1] for each in bad_words if output[len(output) - len(each) + 1 :] == each[:-1]}
    expected &= {each[-1] for each in bad_words if len(each) - 1 <= len(output)}
    assert (set() if rules is None else rules.banned_after(np.array(output, np.int32))) == expected


def test_many_bad_words_with_one_prefix_take_little_time() -> None:
    words = [[3 + i // 32, 3 + i % 32, *[9] * 12, 5, 7] for i in range(MAX_BAD_WORDS)]
    submit = Submit(request_id="r", token_ids=np.array([5], np.int32), sampling=SamplingParams(), bad_words=words)
    rules = TokenRules.of(submit)
    assert rules is not None
    output = np.array([5] * 1000, np.int32)
    assert min(timeit.repeat(lambda: rules.banned_after(output), number=10, repeat=10)) < 10 * 0.25e-3


def test_only_the_end_of_an_output_is_compared_with_bad_words() -> None:
    submit = Submit(
        request_id="r", token_ids=np.array([5], np.int32), sampling=SamplingParams(), bad_words=[[3, 0, 7], [0, 8]]
    )
    rules = TokenRules.of(submit)
    assert rules is not None
    output = np.zeros(1_000_000, np.int32)
    output[-2] = 3
    tracemalloc.start()
    try:
        assert rules.banned_after(output) == {7, 8}
        assert tracemalloc.get_traced_memory()[1] < 10_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("bad_words", "sampling", "name"),
    [
        ([[7]], {"allowed_token_ids": [7]}, "bad_words"),
        ([[5, 7], [9]], {"allowed_token_ids": [7, 9]}, "bad_words"),
        ([[each] for each in range(tiny.VOCAB_SIZE)], {}, "bad_words"),
        ([], {"allowed_token_ids": [tiny.EOS], "min_tokens": 1, "ignore_eos": False}, "min_tokens"),
        ([], {"allowed_token_ids": [7], "min_tokens": 1, "stop_token_ids": [7]}, "min_tokens"),
        ([], {"min_tokens": 1, "stop_token_ids": list(range(tiny.VOCAB_SIZE))}, "min_tokens"),
        ([], {"allowed_token_ids": [tiny.VOCAB_SIZE]}, "allowed_token_ids"),
        ([[tiny.VOCAB_SIZE]], {}, "bad_words"),
    ],
)
def test_rules_that_leave_no_token_are_refused(bad_words: list[list[int]], sampling: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        submit(tiny.new_loop(page_size=4, num_pages=60), "r", (5, 9), bad_words, **sampling)
    assert caught.value.name == name


def test_an_allowed_eos_ends_the_output() -> None:
    loop = tiny.new_loop(page_size=4, num_pages=60)
    submit(loop, "r", (5, 9), [], allowed_token_ids=[tiny.EOS, 7], min_tokens=2, ignore_eos=False, max_tokens=6)
    submit(loop, "end", (5, 9), [], allowed_token_ids=[tiny.EOS], ignore_eos=False)
    found = tiny.run(loop)
    assert found["r"].tokens[:2] == [7, 7]
    assert (found["end"].tokens, found["end"].finish_reason) == ([tiny.EOS], "stop")


def test_biases_are_sent_to_the_engine_once_per_admission() -> None:
    loop = tiny.new_loop(page_size=4, num_pages=10)
    plans: list[Any] = []
    loop.scheduler.step_planned = lambda plan: plans.append(plan.sample)
    biases = {each: 0.5 if each > 7 else 100.0 for each in range(7, tiny.VOCAB_SIZE)}
    for name, prompt in zip("abc", PROMPTS, strict=True):
        submit(loop, name, prompt, [], logit_bias=biases)
    found = tiny.run(loop)
    assert [found[name].tokens for name in "abc"] == [[7] * 10] * 3
    assert all(len(plan.biased) == len(plan.index) for plan in plans)
    num_preemptions = loop.scheduler.stats.num_preemptions
    assert num_preemptions > 0, "a preempted request sends them again, as it has another row"
    assert sum(len(plan.bias_states) for plan in plans) == 3 + num_preemptions
    assert not any(len(plan.banned_index) for plan in plans)


def test_messages_with_a_bias_per_token_decode_quickly() -> None:
    """The scheduler decodes one such message per output between two steps."""
    ids = tuple(range(2**17))
    sampling = SamplingParams(logit_bias=dict.fromkeys(ids, 1.0), allowed_token_ids=ids)
    data = encode(Submit(request_id="r", token_ids=np.array([5], np.int32), sampling=sampling))
    decode = decoder(Submit)
    assert (decode(data).bias_ids == ids).all()
    assert min(timeit.repeat(lambda: decode(data), number=1, repeat=10)) < 2e-3
