"""Validation of sampling parameters, up to the limits of the engine's number types."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tiny

from minisgl_core.contracts.structured_outputs import StructuredOutputs
from minisgl_core.errors import InvalidValueError
from minisgl_core.protocol.messages import decoder, encode
from minisgl_core.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams

INTEGERS = sorted(
    {edge + more for edge in (-(2**63), -(2**31), 0, 2**31, 2**63, 10**400, 10**5000) for more in (-1, 0, 1)}
)
FLOATS = (-0.0, 0, 5e-324, 1e-46, 1e-38, 1e-6, 1e-5, 1 - 2**-53, 1, 2, 1e6, 3.4e38, 3.5e38, 1.7e308, 10**400)
FLOATS = (*FLOATS, *(-value for value in FLOATS), math.inf, -math.inf, math.nan)
COUNTS = ("max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs", "prompt_logprobs")
NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


def edge_cases() -> list[dict[str, object]]:
    cases: list[dict[str, object]] = [{name: value} for name in COUNTS for value in INTEGERS]
    cases += [{"min_tokens": value, "max_tokens": value} for value in INTEGERS]
    cases += [{"stop_token_ids": (value,)} for value in INTEGERS]
    cases += [{"logit_bias": {value: 1.0}} for value in INTEGERS]
    cases += [{name: value} for name in NUMBERS for value in FLOATS]
    cases += [{"logit_bias": {7: value}} for value in FLOATS]
    return cases


@pytest.mark.filterwarnings("error")
def test_all_numbers_are_refused_by_name_or_run() -> None:
    loop = tiny.new_loop(page_size=4, num_pages=400)
    served: dict[str, SamplingParams] = {}
    refused: list[tuple[str, dict[str, object]]] = []
    for cases in edge_cases():
        try:
            sampling = SamplingParams(**{"max_tokens": 3, "ignore_eos": True} | cases)  # type: ignore[arg-type]
            for each in sampling.split():
                name = f"r{len(served)}"
                tiny.submit(loop, name, (5, 9, 3), each)
                served[name] = each
        except InvalidValueError as error:
            refused.append((error.name, cases))
    assert all(name.partition("[")[0] in cases for name, cases in refused)
    found = tiny.run(loop)
    for name, sampling in served.items():
        assert len(found[name].tokens) == sampling.max_tokens or found[name].finish_reason == "stop"
        assert all(0 <= token < tiny.VOCAB_SIZE for token in found[name].tokens)


@pytest.mark.parametrize("top_k", [tiny.VOCAB_SIZE, 2**31, 2**64])
def test_top_k_beyond_the_vocabulary_keeps_all_tokens(top_k: int) -> None:
    loop = tiny.new_loop(page_size=4, num_pages=400)
    for name, k in (("all", 0), ("many", top_k)):
        tiny.submit(loop, name, (5, 9, 3), SamplingParams(max_tokens=12, seed=3, top_k=k, ignore_eos=True))
    found = tiny.run(loop)
    assert found["many"].tokens == found["all"].tokens


@pytest.mark.parametrize("temperature", [1e-46, 1e-38, 1e-6, 1e-5])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    loop = tiny.new_loop(page_size=4, num_pages=400)
    tiny.submit(loop, "cold", (5, 9, 3), SamplingParams(max_tokens=12, temperature=temperature, ignore_eos=True))
    assert tuple(tiny.run(loop)["cold"].tokens) == tiny.greedy((5, 9, 3), 12)


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
@pytest.mark.parametrize("value", [-1.0, 1.1e6, 3.5e38, 10**400, math.inf, math.nan])
def test_factors_that_overflow_float32_are_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidValueError, match=f"{name}=.* must be a number from .* to 1e6"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, 1e-46, 0.9e-6])
def test_tiny_repetition_penalties_are_refused(value: float) -> None:
    with pytest.raises(InvalidValueError, match="must be a number from 1e-6"):
        SamplingParams(repetition_penalty=value)


def test_the_number_of_stop_tokens_is_limited() -> None:
    assert len(SamplingParams(stop_token_ids=tuple(range(MAX_STOP_TOKEN_IDS))).stop_token_ids) == MAX_STOP_TOKEN_IDS
    with pytest.raises(
        InvalidValueError, match=r"stop_token_ids \(1025 tokens\) is not valid: must be at most 1024 tokens"
    ):
        SamplingParams(stop_token_ids=tuple(range(MAX_STOP_TOKEN_IDS + 1)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", 5),
        ("stop", [""]),
        ("stop", ["a", 5]),
        ("stop", b"ab"),
        ("stop_token_ids", 5),
        ("stop_token_ids", "12"),
        ("stop_token_ids", [5.5]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [[5]]),
        ("logit_bias", [5]),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {9.7: 100}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias[5]", {5: "1"}),
        ("logit_bias[5]", {5: None}),
        ("logit_bias[5]", {5: True}),
        ("ignore_eos", "no"),
        ("ignore_eos", None),
        ("skip_special_tokens", 1),
        ("include_stop_str_in_output", "yes"),
        ("bad_words", [""]),
        ("bad_words", {"a": 1, "": 2}),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [True]),
        ("allowed_token_ids", "12"),
        ("structured_outputs", {"json": {}}),
    ],
)
def test_values_of_wrong_types_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidValueError) as caught:
        SamplingParams(**{name.partition("[")[0]: value})  # type: ignore[arg-type]
    assert caught.value.name == name


def test_collections_of_any_type_are_accepted() -> None:
    nothing = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None)  # type: ignore[arg-type]
    assert nothing == SamplingParams(stop=[], stop_token_ids=[], logit_bias={}) == SamplingParams()  # type: ignore[arg-type]
    given = SamplingParams(
        stop=["a"],  # type: ignore[arg-type]
        stop_token_ids=np.array([5, 6]),  # type: ignore[arg-type]
        logit_bias={np.int64(7): np.float32(1.5)},  # type: ignore[dict-item]
    )
    assert given == SamplingParams(stop="a", stop_token_ids=(5, 6), logit_bias={7: 1.5})  # type: ignore[arg-type]
    assert decoder(SamplingParams)(encode(given)) == given  # type: ignore[arg-type]


def test_numpy_numbers_are_accepted() -> None:
    given = SamplingParams(max_tokens=np.int64(9), temperature=np.float32(0.5))  # type: ignore[arg-type]
    assert decoder(SamplingParams)(encode(given)) == SamplingParams(max_tokens=9, temperature=0.5)


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 5, 2**63 - 1])
def test_the_first_of_n_outputs_has_the_seed_of_a_single_one(seed: int) -> None:
    seeds = [each.seed for each in SamplingParams(seed=seed, n=3).split()]
    assert seeds[0] == seed
    assert len(set(seeds)) == 3
    assert all(SamplingParams(seed=each).seed == each for each in seeds)


def test_log_probabilities_of_the_prompt_are_requested_once_for_n_outputs() -> None:
    assert [each.prompt_logprobs for each in SamplingParams(n=3, prompt_logprobs=2).split()] == [2, None, None]


def test_sizes_of_sampling_parameters_are_bounded() -> None:
    with pytest.raises(InvalidValueError, match=r"stop \(257 strings\) is not valid: must be at most 256 strings"):
        SamplingParams(stop=["a"] * 257)
    with pytest.raises(
        InvalidValueError, match=r"bad_words \(1025 strings\) is not valid: must be at most 1024 strings"
    ):
        SamplingParams(bad_words=("a",) * 1025)
    with pytest.raises(InvalidValueError, match="must be at most 16384 characters in all"):
        SamplingParams(bad_words=("a" * 9000, "b" * 9000))
    with pytest.raises(
        InvalidValueError, match=r"bad_words \(33 texts\) is not valid: must be at most 32 texts with n=128"
    ):
        SamplingParams(n=128, bad_words=("a",) * 33)
    with pytest.raises(InvalidValueError, match=r"allowed_token_ids.* must be at most 8192 tokens with n=128"):
        SamplingParams(n=128, allowed_token_ids=tuple(range(8193)))
    biases = dict.fromkeys(range(10_000), 1.0)
    assert len(SamplingParams(n=100, logit_bias=biases).split()[99].logit_bias) == 10_000
    with pytest.raises(InvalidValueError, match="must be at most 8192 tokens with n=128"):
        SamplingParams(n=128, logit_bias=biases)


def test_allowed_token_ids_with_a_grammar_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="left out with a structured output"):
        SamplingParams(allowed_token_ids=(5,), structured_outputs=StructuredOutputs(regex="a"))
    assert SamplingParams(allowed_token_ids=[7, 5, 7]).allowed_token_ids == (7, 5)  # type: ignore[arg-type]


def test_stop_strings_are_limited_in_total() -> None:
    SamplingParams(stop=("x" * 2**14, "y" * 2**14))
    with pytest.raises(InvalidValueError, match="at most 32768 characters"):
        SamplingParams(stop=("x" * 2**14, "y" * 2**14, "z"))


def test_errors_show_only_the_beginning_of_large_values() -> None:
    for value in ("x" * 10**6, [5] * 10**6, dict.fromkeys(range(10**5), "x"), [[[5] * 1000] * 1000] * 1000, 10**5000):
        error = InvalidValueError("stop", value, "smaller")
        assert str(error).startswith("stop=")
        assert len(str(error)) < 200
