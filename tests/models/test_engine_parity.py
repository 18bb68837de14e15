"""Greedy tokens of the engine equal those of transformers: small pages, chunks, shared prefixes, few pages, two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from tempfile import mkdtemp
from typing import Any

import pytest
import test_architectures as architectures
import torch

from minisgl_core import LLM, SamplingParams

CASES = [
    architectures.TestGemma2,
    architectures.TestGemma3,
    architectures.TestGemma3WithImages,
    architectures.TestGlm4,
    architectures.TestGranite,
    architectures.TestOlmo2,
    architectures.TestOlmo3,
    architectures.TestPhi3,
    architectures.TestPhi4Mini,
]
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@lru_cache
def saved(case: type[architectures.ModelTests]) -> tuple[Any, str]:
    """The transformers model and its folder."""
    folder = mkdtemp(prefix=f"{case.__name__}-")
    reference = case().make_reference()
    reference.save_pretrained(folder)
    return reference, folder


@lru_cache
def prompts() -> list[list[int]]:
    """Longer than the models' windows and than LongRoPE's original context; the first four begin alike."""
    ids = torch.randint(3, 100, (80,), generator=torch.Generator().manual_seed(3)).tolist()
    return [ids[:33], [*ids[:20], 7, 9], [*ids[:32], 5], ids[:17], ids[40:67]]


@torch.inference_mode()
def check(reference: Any, prompt: list[int], tokens: list[int]) -> None:
    """Each token is the most likely one after the prompt and the tokens before it."""
    logits = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    assert tokens == logits.argmax(-1).tolist()


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def new_llm(folder: str, **options: Any) -> LLM:
    return LLM(folder, dtype="float32", platform="cpu", ops="torch", attn="torch", cache="radix", **options)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("page_size", "num_pages", "chunk"), [(1, 60, 7), (16, 6, 24)])
def test_greedy_tokens(case: type[architectures.ModelTests], page_size: int, num_pages: int, chunk: int) -> None:
    """Too few pages for all requests at once, and prompts in chunks; the second round finds prefixes in the cache."""
    reference, folder = saved(case)
    with new_llm(folder, page_size=page_size, num_pages=num_pages, max_prefill_length=chunk) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts(), GREEDY)
            for prompt, output in zip(prompts(), outputs, strict=True):
                check(reference, prompt, output.token_ids)
        assert sum(output.cached_tokens for output in outputs) > 0
        assert llm.stats.num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_of_two_ranks(case: type[architectures.ModelTests]) -> None:
    reference, folder = saved(case)
    with new_llm(folder, tp=2, page_size=16, num_pages=40, max_prefill_length=24) as llm:
        for prompt, output in zip(prompts(), llm.generate(prompts(), GREEDY), strict=True):
            check(reference, prompt, output.token_ids)
