"""Prompts of benchmark conversations: lengths and shared prefixes, and the statistics of the report."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minisgl_server.bench.serve.conversations import (
    Conversation,
    block_content_ids,
    limited,
    random_conversations,
    trace_conversations,
)
from minisgl_server.bench.serve.load import Outcome
from minisgl_server.bench.serve.prompts import Prompts, chats_of
from minisgl_server.bench.serve.request import Record
from minisgl_server.bench.serve.summary import summarize
from minisgl_server.bench.trace.format import TraceRequest


def made(count: int, variant: int = 1, **spec: Any) -> list[Conversation]:
    lengths = {"input_len": (5, 9), "output_len": (3, 3), "num_turns": 1, "turn_delay": 0.0, "seed": 7}
    options = SimpleNamespace(**lengths | {"shared_prefix_tokens": 0, "num_prefixes": 1} | spec)
    conversations = random_conversations(options, itertools.count(), 50, variant)
    return list(itertools.islice(conversations, count))


def test_prompts_share_only_the_prefix_of_their_group() -> None:
    found = made(20, shared_prefix_tokens=6, num_prefixes=2)
    firsts = [each.turns[0].content[0] for each in found]
    assert len(set(firsts)) == 20
    for one, two in itertools.combinations(found, 2):
        assert (one.prefix == two.prefix).all() == (one.number % 2 == two.number % 2)
    assert {5, 6, 7, 8, 9} == {len(each.turns[0].content) for each in found}
    assert all(0 <= number < 50 for each in found for number in each.turns[0].content)


def test_variants_have_equal_lengths_and_different_content() -> None:
    for one, two in zip(made(9, 1, num_turns=3), made(9, 2, num_turns=3), strict=True):
        for a, b in zip(one.turns, two.turns, strict=True):
            assert (len(a.content), a.output_len) == (len(b.content), b.output_len)
            assert (a.content != b.content).any()


def test_limited_ends_within_a_conversation() -> None:
    assert [len(each.turns) for each in limited(made(9, num_turns=4), 10)] == [4, 4, 2]
    assert [len(each.turns) for each in limited(made(2, num_turns=4), None)] == [4, 4]


def num_shared_tokens(one: np.ndarray, two: np.ndarray) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def test_prompts_share_content_like_the_blocks_of_the_trace() -> None:
    random = np.random.default_rng(0)
    trace, paths = [], [[int(block) for block in random.integers(0, 400, 5)] for _ in range(10)]
    for at in range(40):
        ids = [*paths[at % 10][: int(random.integers(0, 6))], 500 + at, 600 + at]
        length = 16 * len(ids) - int(random.integers(0, 16))
        trace.append(TraceRequest(chat_id=at, timestamp=at, input_length=length, output_length=1, hash_ids=ids))
    for seed in (0, 1):
        found = [each.turns[0].content for each in trace_conversations(trace, 2.0, 1000, 0, seed, 1)]
        assert [len(numbers) for numbers in found] == [request.input_length for request in trace]
        for (a, one), (b, two) in itertools.combinations(zip(trace, found, strict=True), 2):
            expected = min(
                16 * num_shared_tokens(np.array(a.hash_ids), np.array(b.hash_ids)), a.input_length, b.input_length
            )
            assert num_shared_tokens(one, two) == expected
    others = [each.turns[0].content for each in trace_conversations(trace, 2.0, 1000, 0, 1, 2)]
    assert all(num_shared_tokens(one, two) == 0 for one, two in zip(found, others, strict=True))


def test_block_content_looks_random() -> None:
    numbers = block_content_ids(np.arange(5000), 1000)
    counts = np.bincount(numbers.reshape(-1, 16)[:, 2:].ravel(), minlength=1000)
    assert counts.mean() == 70
    assert counts.var() == pytest.approx(70, rel=0.2), "the variance of independent draws"


def test_id_histories() -> None:
    history = Prompts(100).start(np.array([1, 2]))
    prompt, num_tokens = history.next_prompt(np.array([3]))
    assert (list(prompt), num_tokens) == ([1, 2, 3], 3)
    history.add_response("whatever", np.array([8, 9]))
    prompt, num_tokens = history.next_prompt(np.array([4]))
    assert (list(prompt), num_tokens) == ([1, 2, 3, 8, 9, 4], 6)


def test_chat_words_are_single_tokens(engine_tokenizer: Any) -> None:
    prompts = chats_of(engine_tokenizer)
    assert prompts.num_content_ids > 1000
    random = np.random.default_rng(0)
    for with_prefix in (False, True):
        history = prompts.start(random.integers(0, prompts.num_content_ids, 30 * with_prefix))
        messages, num_tokens = history.next_prompt(random.integers(0, prompts.num_content_ids, 300))
        text = engine_tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert len(engine_tokenizer.encode(text, add_special_tokens=False)) == num_tokens
        history.add_response("An answer.", np.zeros(0, np.int64))
        messages, num_tokens = history.next_prompt(np.array([1]))
        roles = [message["role"] for message in messages]  # type: ignore[index]
        assert roles == ["system"] * with_prefix + ["user", "assistant", "user"]
        assert num_tokens is None


def record(**values: Any) -> Record:
    return Record(0, 0, 10, 5, **values)


def test_statistics_of_the_report() -> None:
    good = {"num_prompt_tokens": 10, "num_output_tokens": 5, "has_usage": True}
    records = [
        record(sent_s=0.0, ttft_s=0.1, latency_s=0.5, gaps_s=[0.1] * 4, num_cached_tokens=4, **good),
        record(sent_s=0.2, ttft_s=0.3, latency_s=0.7, gaps_s=[0.1] * 4, num_cached_tokens=None, **good),
        record(sent_s=0.6, latency_s=0.1, error="HTTP 500: x"),
        record(sent_s=1.9, latency_s=0.1, is_interrupted=True),
    ]
    outcome = Outcome(records=records, seconds=2.0, client_cpu_s=0.001)
    found = summarize(outcome, {"ttft": 200, "tpot": 100.1}, True, {"api": 0.002, "tokenizer 0": 0.001, "rank": 1.0})
    counts = ("num_sent", "num_completed", "num_failed", "num_interrupted", "num_prompt_tokens", "num_output_tokens")
    assert [found[name] for name in counts] == [4, 2, 1, 1, 20, 10]
    assert found["hit_rate"] == pytest.approx(0.2), "a missing value counts as zero if others are reported"
    assert found["goodput_per_s"] == pytest.approx(0.5)
    assert found["output_tokens_per_s"] == pytest.approx(5)
    assert found["peak_concurrency"] == 2
    assert found["ttft_ms"]["mean"] == pytest.approx(200)
    assert found["ttft_ms"]["p90"] == pytest.approx(280)
    assert (found["tpot_ms"]["p50"], found["itl_ms"]["p99"], found["latency_ms"]["max"]) == pytest.approx(
        (100, 100, 700)
    )
    assert found["client_cpu_us_per_token"] == pytest.approx(100)
    assert found["frontend_cpu_us_per_token"] == pytest.approx(300)
    empty = summarize(Outcome(), {"ttft": 1}, True, {})
    assert empty["ttft_ms"] is empty["hit_rate"] is empty["frontend_cpu_us_per_token"] is None
