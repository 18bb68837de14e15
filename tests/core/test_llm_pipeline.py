"""`LLM` with pipeline stages gives the tokens of one rank for all sampling parameters, and no rank outlives another."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import psutil
import pytest
import tiny
import tiny_folder
import torch

from minisgl_core import LLM, SamplingParams
from minisgl_core.contracts.structured_outputs import StructuredOutputs
from minisgl_core.errors import InvalidValueError, WorkerDiedError
from minisgl_core.llm import GenerationOutput
from minisgl_core.testing.grammar_kit import EOS, VOCAB_SIZE, byte_tokenizer

DEADLINE_S = 10.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
RANDOM = replace(GREEDY, temperature=0.9, seed=4)
SAMPLINGS = [
    GREEDY,
    replace(GREEDY, max_tokens=24, logprobs=3, prompt_logprobs=2),
    RANDOM,
    replace(RANDOM, n=2, top_k=7, top_p=0.9, seed=11),
    replace(RANDOM, presence_penalty=0.6, frequency_penalty=0.4, repetition_penalty=1.3, logprobs=1),
    replace(GREEDY, ignore_eos=False, min_tokens=3, stop_token_ids=(7, 20, 33, 48), logit_bias={9: 2.0}),
    replace(GREEDY, allowed_token_ids=(5, 6, 7, 8), max_tokens=6),
    replace(RANDOM, max_tokens=20, seed=2),
]
GRAMMAR = replace(RANDOM, structured_outputs=StructuredOutputs(regex="(ab|c)+[0-9]{4}"))
SHARED = [5, 9, 3, 7, 11, 30, 31, 32, 33, 34, 35, 36, 37]
PROMPTS = [[*SHARED, 40 + number, *range(3, 3 + number)] for number in range(len(SAMPLINGS) + 1)]


def new_llm(model: str, **options: Any) -> LLM:
    """Return an `LLM` whose pool does not hold six running requests, and whose chunks are shorter than the prompts."""
    fixed: dict[str, Any] = {"dtype": "float32", "platform": "cpu", "ops": "torch", "page_size": 4, "num_pages": 25}
    fixed |= {"max_seq_len_override": 64, "max_prefill_length": 9, "max_running_requests": 6}
    return LLM(model, **(fixed | options))


def dense(kind: str, num_layers: int, **changes: Any) -> str:
    """Write a tiny random model of this type, and a tokenizer that grammars can read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(9)
    config = AutoConfig.for_model(
        kind,
        vocab_size=VOCAB_SIZE,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.4,
        bos_token_id=EOS[0],
        eos_token_id=list(EOS),
        **changes,
    )
    folder = Path(mkdtemp(prefix=f"tiny-{kind}-"))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@lru_cache
def qwen2() -> str:
    """Only the last layer has a sliding window."""
    window = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}
    return dense("qwen2", 3, tie_word_embeddings=True, **window)


@lru_cache
def qwen3() -> str:
    return dense("qwen3", 5, head_dim=8, tie_word_embeddings=False)


@pytest.fixture(autouse=True)
def one_thread_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def children() -> list[psutil.Process]:
    """Return the rank processes that this one started, in order."""
    found = {" ".join(child.cmdline()): child for child in psutil.Process().children() if child.is_running()}
    return [found[title] for title in sorted(found) if "engine rank" in title]


def generated(llm: LLM) -> list[GenerationOutput]:
    """Return the outputs of two runs. In the second one, many pages of the prompts are cached."""
    samplings = [*SAMPLINGS, GRAMMAR if llm.info.model in (qwen2(), qwen3()) else GREEDY]
    first, second = llm.generate(PROMPTS, samplings), llm.generate(PROMPTS[::-1], samplings[::-1])
    assert llm.stats.num_preemptions > 0
    assert sum(output.cached_tokens for output in second) > 0
    tiny.assert_nothing_in_use(llm._loop)
    return first + second


@lru_cache
def outputs_of_one_rank(model: str) -> list[GenerationOutput]:
    with new_llm(model) as llm:
        return generated(llm)


def assert_equal(found: GenerationOutput, expected: GenerationOutput) -> None:
    assert found.token_ids == expected.token_ids
    assert (found.text, found.finish_reason) == (expected.text, expected.finish_reason)
    for mine, theirs in ((found.logprobs, expected.logprobs), (found.prompt_logprobs, expected.prompt_logprobs)):
        assert [each and each.token.token_id for each in mine or []] == [
            each and each.token.token_id for each in theirs or []
        ]
        mine_and_theirs = zip(filter(None, mine or []), filter(None, theirs or []), strict=True)
        for one, other in mine_and_theirs:
            assert one.token.logprob == pytest.approx(other.token.logprob, abs=1e-4)
            assert [each.token_id for each in one.top] == [each.token_id for each in other.top]


def abort_in_flight(llm: LLM) -> None:
    """Close a stream whose request is in a step in flight, while others run."""
    [alone] = llm.generate(PROMPTS[2], GREEDY)
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:3]]
    beginning = [next(stream) for stream in streams]
    assert llm._loop._in_flight
    streams[0].close()
    assert beginning[2] + "".join(streams[2]) == alone.text
    streams[1].close()
    tiny.assert_nothing_in_use(llm._loop)


def kill(llm: LLM, rank: int) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    children()[rank - 1].kill()
    started = time.monotonic()
    with pytest.raises(WorkerDiedError, match=rf"'engine rank {rank}' was killed by SIGKILL"):
        list(stream)
    assert time.monotonic() - started < DEADLINE_S


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "tp", "pp", "overlap", "victim"),
    [
        (tiny_folder.llama, 2, 2, True, 1),
        pytest.param(tiny_folder.qwen3_moe, 2, 2, False, 2, marks=pytest.mark.nightly),
        (qwen2, 1, 2, False, 1),
        pytest.param(qwen3, 1, 3, True, 1, marks=pytest.mark.nightly),
        pytest.param(tiny_folder.qwen3_moe, 1, 3, False, 2, marks=pytest.mark.nightly),
    ],
)
def test_outputs_of_stages_equal_those_of_one_rank(
    model: Callable[[], str], tp: int, pp: int, overlap: bool, victim: int
) -> None:
    """At the end a rank of any stage is killed, which ends all ranks."""
    expected = outputs_of_one_rank(model())
    with new_llm(model(), tp=tp, pp=pp, disable_overlap=not overlap) as llm:
        assert len(children()) == tp * pp - 1
        for found, right in zip(generated(llm), expected, strict=True):
            assert_equal(found, right)
        abort_in_flight(llm)
        kill(llm, victim)
    assert children() == []


@pytest.mark.slow
def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="--pp=3 is not valid: must be at most 2, the layers of the model"):
        new_llm(tiny_folder.llama(), pp=3)
    assert children() == []
