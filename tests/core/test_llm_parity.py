"""Greedy tokens of a trained model equal transformers, alone and batched, for all page sizes, caches and overlap."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_core import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_TOKENS, NUM_TOKENS_ALONE = 36, 8
"""Output tokens of batched requests, and of requests that run alone, which take longer per token."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 64, 300, 100, 600]
"""Prompts end inside a page, at its end and after it, for both page sizes."""


@pytest.fixture(scope="module")
def prompts(engine_tokenizer: Any) -> list[list[int]]:
    """Return prompts of which every second one is a prefix of the longest; the others start at random positions."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    ids: list[int] = engine_tokenizer(" ".join(text.split()))["input_ids"]
    return [ids[29 * place * (1 - place % 2) :][:length] for place, length in enumerate(LENGTHS)]


class Reference:
    """transformers' model of the same file."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._checked: dict[tuple[int, ...], list[int]] = {}

    def check(self, prompt: list[int], tokens: list[int]) -> None:
        """Check greedy generation: each token is the most likely one after the prompt and the tokens before it.

        One forward pass checks them all. Later runs must generate the same tokens, or fewer of them.
        """
        if len(self._checked.get(tuple(prompt), ())) < len(tokens):
            with torch.inference_mode():
                logits = self._model(torch.tensor([prompt + tokens[:-1]]), logits_to_keep=len(tokens)).logits[0]
            assert tokens == logits.argmax(-1).tolist()
            self._checked[tuple(prompt)] = tokens
        assert tokens == self._checked[tuple(prompt)][: len(tokens)]


@pytest.fixture(scope="module")
def reference(smollm2_reference: Any) -> Reference:
    return Reference(smollm2_reference)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"page_size": 1, "cache": "naive", "disable_overlap": True, "num_pages": 2000, "max_prefill_length": 300},
            marks=pytest.mark.nightly,
        ),
        # too few pages for all requests at once
        {"page_size": 16, "cache": "radix", "disable_overlap": False, "num_pages": 70},
    ],
)
def test_batched_and_alone(prompts: list[list[int]], reference: Reference, options: dict[str, Any]) -> None:
    with LLM(dtype="float32", quantization="none", **options) as llm:
        outputs = llm.generate(prompts, GREEDY)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert len(output.token_ids) == NUM_TOKENS
            reference.check(prompt, output.token_ids)
        assert (sum(output.cached_tokens for output in outputs) > 200) == (options["cache"] == "radix")
        assert (llm.stats.num_preemptions > 0) == (options["num_pages"] == 70)
        for prompt in prompts:
            [output] = llm.generate(prompt, replace(GREEDY, max_tokens=NUM_TOKENS_ALONE))
            assert len(output.token_ids) == NUM_TOKENS_ALONE
            reference.check(prompt, output.token_ids)
