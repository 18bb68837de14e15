"""The sampler against its definition in float64, one request at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from minisgl_core.contracts.ops import SamplingOps
from minisgl_core.engine.sampler import Sampler, token_logprobs
from minisgl_core.platforms.cpu import CpuPlatform
from minisgl_core.protocol.batch_plan import BiasState, PenaltyState, SamplePlan
from minisgl_core.sampling_params import SamplingParams
from minisgl_core.scheduler.random_numbers import uniforms
from minisgl_core.utils.deterministic_cumsum import deterministic_cumsum

OPS = SamplingOps(torch.device("cpu"), torch.float32)
NO_INTS, NO_FLOATS = np.empty(0, np.int32), np.empty(0, np.float32)


def plan(params: list[SamplingParams], uniform: np.ndarray, **more: object) -> SamplePlan:
    fields: dict[str, object] = {
        "index": np.arange(len(params), dtype=np.int32),
        "temperature": np.array([0.0 if p.is_greedy else p.temperature for p in params], np.float32),
        "top_k": np.array([max(p.top_k, 0) for p in params], np.int32),
        "top_p": np.array([p.top_p for p in params], np.float32),
        "min_p": np.array([p.min_p for p in params], np.float32),
        "uniform": uniform.astype(np.float32),
        "num_logprobs": np.full(len(params), -1, np.int32),
        "penalties": NO_FLOATS,
        "penalty_states": [],
        "bias_states": [],
        "biased": NO_INTS,
        "banned_index": NO_INTS,
        "banned_token": NO_INTS,
        "masked": NO_INTS,
    }
    return SamplePlan(**(fields | more))  # type: ignore[arg-type]


def expected_distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Return the distribution that `params` define, float64 [V]."""
    scaled = logits.astype(np.float64) / params.temperature
    if params.top_k > 0:
        scaled[scaled < np.sort(scaled)[-min(params.top_k, len(scaled))]] = -np.inf
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = np.argsort(-probs)
    before = np.cumsum(probs[order]) - probs[order]
    keep = np.zeros(len(probs), bool)
    keep[order[before < params.top_p]] = True
    keep &= probs >= params.min_p * probs.max()
    probs = np.where(keep, probs, 0)
    return probs / probs.sum()


sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 50, 5000]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
)


@settings(max_examples=60)
@given(st.lists(sampling, min_size=1, max_size=5), st.integers(0, 2**32 - 1), st.sampled_from([40, 2000]))
def test_tokens_equal_the_definition_in_any_batch(params: list[SamplingParams], seed: int, vocab_size: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(len(params), vocab_size)).astype(np.float32) * 4
    uniform = rng.random(len(params)).astype(np.float32)
    sampler = Sampler(len(params), vocab_size, CpuPlatform(), OPS)
    rows = torch.arange(1, len(params) + 1)
    together = sampler(torch.from_numpy(logits), plan(params, uniform), rows).tolist()
    for i, each in enumerate(params):
        alone = sampler(torch.from_numpy(logits[i : i + 1]), plan([each], uniform[i : i + 1]), rows[i : i + 1])
        assert alone.item() == together[i]
        if each.is_greedy:
            assert together[i] == logits[i].argmax()
            continue
        probs = expected_distribution(logits[i], each)
        assert probs[together[i]] > 0
        cumulative = np.cumsum(probs)
        # The number lies in the token's interval, up to the rounding of float32 sums.
        assert cumulative[together[i]] >= uniform[i] - 1e-4
        assert cumulative[together[i]] - probs[together[i]] <= uniform[i] + 1e-4


class FindsSingleRowScans(TorchDispatchMode):
    """Finds cumulative sums over one row, which CUDA computes in varying order, so that ranks may get different results."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.Size] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.cumsum.default and args[0].is_floating_point():
            self.found += [args[0].shape] if args[0].numel() == args[0].shape[args[1]] else []
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("top_k", [0, 7])
def test_no_cumulative_sum_runs_over_a_single_row(top_k: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(4).normal(size=(1, 3000)).astype(np.float32))
    sampling_batch = plan([SamplingParams(temperature=1.0, top_p=0.9, top_k=top_k)], np.array([0.5]))
    with FindsSingleRowScans() as scans:
        Sampler(1, 3000, CpuPlatform(), OPS)(logits, sampling_batch, torch.tensor([1]))
        assert scans.found == []
        logits.cumsum(-1)
    assert scans.found == [logits.shape]


def test_cumulative_sums_do_not_depend_on_the_batch() -> None:
    rows = torch.from_numpy(np.random.default_rng(5).random((3, 3000)).astype(np.float32))
    for count in range(4):
        assert torch.equal(deterministic_cumsum(rows[:count]), rows[:count].cumsum(-1))


def test_frequencies_follow_the_distribution() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.15, 0.1]], np.float32)).repeat(4000, 0)
    uniform = uniforms(np.full(4000, 11, np.uint64), np.arange(4000, dtype=np.int32))
    params = [SamplingParams(temperature=1.0, top_k=3)] * 4000
    tokens = Sampler(4000, 4, CpuPlatform(), OPS)(torch.from_numpy(logits), plan(params, uniform), torch.arange(4000))
    counts = np.bincount(tokens.numpy(), minlength=4) / 4000
    np.testing.assert_allclose(counts, np.array([0.5, 0.25, 0.15, 0]) / 0.9, atol=0.03)


def test_uniforms_are_uniform_and_below_one() -> None:
    numbers = uniforms(np.arange(20_000, dtype=np.uint64), np.full(20_000, 3, np.int32))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    np.testing.assert_allclose(np.histogram(numbers, 10, (0, 1))[0] / 2000, 1, atol=0.12)
    assert len(np.unique(uniforms(np.full(1000, 5, np.uint64), np.arange(1000, dtype=np.int32)))) > 990


@pytest.mark.parametrize("state", ["fresh", "resumed"])
def test_penalties_follow_openai_and_ctrl(state: str) -> None:
    vocab_size = 12
    logits = np.random.default_rng(0).normal(size=(2, vocab_size)).astype(np.float32)
    prompt, output = np.array([1, 2, 2], np.int32), np.array([3, 3, 4], np.int32)
    presence, frequency, repetition = 0.7, 0.4, 1.5
    expected = logits[1].astype(np.float64)
    for token in {1, 2, 3, 4}:
        expected[token] = expected[token] / repetition if expected[token] > 0 else expected[token] * repetition
    expected[3] -= 2 * frequency + presence
    expected[4] -= frequency + presence

    sampler = Sampler(4, vocab_size, CpuPlatform(), OPS)
    rows = torch.tensor([3, 2])
    penalties = np.array([0, presence, 0, frequency, 1, repetition], np.float32)
    params = [SamplingParams(temperature=0.0)] * 2
    start = output if state == "resumed" else NO_INTS
    first = plan(
        params,
        np.zeros(2),
        penalties=penalties,
        penalty_states=[PenaltyState(row=2, prompt_ids=prompt, output_ids=start)],
    )
    if state == "fresh":
        for token in output:  # each sampled token counts from the next step
            forced = np.full((2, vocab_size), -1e4, np.float32)
            forced[:, token] = 1e4
            assert sampler(torch.from_numpy(forced), first, rows).tolist() == [token, token]
            first.penalty_states = []
    found = sampler._apply_penalties(torch.from_numpy(logits), first, rows) if state == "fresh" else None
    if found is None:
        sampler(torch.from_numpy(logits), first, rows)
        sampler._start_counts(2, prompt, output)
        found = sampler._apply_penalties(torch.from_numpy(logits), first, rows)
    np.testing.assert_allclose(found[1].numpy(), expected, rtol=1e-5)
    np.testing.assert_allclose(found[0].numpy(), logits[0], rtol=1e-6)


@pytest.mark.parametrize("repetition", [1e-6, 1e6])
@pytest.mark.parametrize("temperature", [1e-5, 1e6])
def test_extreme_parameters_leave_a_valid_distribution(repetition: float, temperature: float) -> None:
    logits = np.random.default_rng(3).normal(size=(1, 40)).astype(np.float32) * 30
    seen = np.arange(5, 30, dtype=np.int32)
    changed = logits.astype(np.float64)
    changed[:, seen] *= np.where(changed[:, seen] > 0, 1 / repetition, repetition)
    sampling_batch = plan(
        [SamplingParams(temperature=temperature)],
        np.array([0.5]),
        penalties=np.array([0, 0, repetition], np.float32),
        penalty_states=[PenaltyState(row=1, prompt_ids=seen, output_ids=NO_INTS)],
    )
    token = Sampler(1, 40, CpuPlatform(), OPS)(torch.from_numpy(logits), sampling_batch, torch.tensor([1])).item()
    probs = expected_distribution(changed[0], SamplingParams(temperature=temperature))
    assert probs[:token].sum() - 1e-4 <= 0.5 <= probs[: token + 1].sum() + 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_and_banned_tokens_apply_per_request(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 5.0, 2.0]] * 3, dtype=dtype)
    greedy = [SamplingParams(temperature=0.0)] * 3
    sampler, rows = Sampler(3, 3, CpuPlatform(), OPS), torch.tensor([3, 1, 2])

    def sample(**changes: object) -> list[int]:
        return list(sampler(logits, plan(greedy, np.zeros(3), **changes), rows).tolist())

    states = [BiasState(row=3, token_ids=np.array([2, 0], np.int32), values=np.array([4.0, 3.5], np.float32))]
    banned = {"banned_index": np.array([1, 1], np.int32), "banned_token": np.array([1, 1], np.int32)}
    assert sample(bias_states=states, biased=np.array([0], np.int32), **banned) == [2, 2, 1]
    assert sample(biased=np.array([0], np.int32)) == [2, 1, 1], "the biases are sent once"
    assert sample() == [1, 1, 1]
    states = [BiasState(row=3, token_ids=np.array([0], np.int32), values=np.array([5.0], np.float32))]
    assert sample(bias_states=states, biased=np.array([0], np.int32)) == [0, 1, 1], "new biases replace the old ones"
    assert torch.equal(logits, torch.tensor([[1.0, 5.0, 2.0]] * 3, dtype=dtype)), "log-probabilities need the logits"


def test_logprobs_are_computed_from_raw_logits() -> None:
    logits = np.random.default_rng(1).normal(size=(3, 30)).astype(np.float32)
    tokens = torch.tensor([4, 17, 29])
    found = token_logprobs(torch.from_numpy(logits), tokens, 5)
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    np.testing.assert_allclose(found.token.numpy(), expected[range(3), tokens], rtol=1e-5)
    np.testing.assert_allclose(found.top.numpy(), -np.sort(-expected)[:, :5], rtol=1e-5)
    assert found.rank.tolist() == [(expected[i] > expected[i, t]).sum() + 1 for i, t in enumerate(tokens.tolist())]
    everything = token_logprobs(torch.from_numpy(logits), tokens, 31)
    np.testing.assert_allclose(everything.top.numpy(), -np.sort(-expected), rtol=1e-5)
