"""LongRoPE in the engine: sequences that stay within the original context, cross its end, or begin beyond it.

The rule is in docs/models.md, and is that of vLLM: the engine's context selects the long or the short factors for all positions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import test_architectures as architectures
import torch

from minisgl_core import LLM, SamplingParams

ORIGINAL, NUM_TOKENS = 24, 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPT = torch.randint(3, 97, (40,), generator=torch.Generator().manual_seed(4)).tolist()


class Phi3(architectures.TestPhi3):
    __test__ = False
    changes: ClassVar = architectures.longrope(ORIGINAL, 1.0)


class Phi3WithLongFactors(Phi3):
    """Phi3 in which transformers uses the long factors at every length."""

    changes: ClassVar = architectures.longrope(ORIGINAL, 1.0)
    settings = changes["rope_parameters" if architectures.IS_TRANSFORMERS_5 else "rope_scaling"]
    settings["short_factor"] = settings["long_factor"]


def by_transformers(reference: Any, num_prompt_tokens: int) -> list[int]:
    ids = torch.tensor([PROMPT[:num_prompt_tokens]])
    # Without a KV cache: transformers versions differ in what they keep beyond the original context.
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None, "use_cache": False}
    generated = reference.generate(ids, max_new_tokens=NUM_TOKENS, **options)[0, num_prompt_tokens:].tolist()
    assert len(set(generated)) > 1, "one repeated token hides mistakes"
    return generated


def by_the_engine(folder: Path, num_prompt_tokens: int, context: int) -> list[int]:
    fixed: dict[str, Any] = {"dtype": "float32", "platform": "cpu", "page_size": 4, "max_prefill_length": 16}
    with LLM(str(folder), max_seq_len_override=context, **fixed) as llm:
        return llm.generate([PROMPT[:num_prompt_tokens]], GREEDY)[0].token_ids


@pytest.mark.parametrize(
    ("num_prompt_tokens", "is_within"),
    [(ORIGINAL - NUM_TOKENS, True), (ORIGINAL - NUM_TOKENS // 2, True), (ORIGINAL + 8, False)],
    ids=["within", "across", "beyond"],
)
def test_longer_contexts_use_the_long_factors(num_prompt_tokens: int, is_within: bool, tmp_path: Path) -> None:
    reference = Phi3().make_reference()
    reference.save_pretrained(tmp_path)
    found = by_the_engine(tmp_path, num_prompt_tokens, 2 * ORIGINAL)
    assert found == by_transformers(Phi3WithLongFactors().make_reference(), num_prompt_tokens)
    differs = found != by_transformers(reference, num_prompt_tokens)
    assert differs == is_within, "transformers uses the short factors until a sequence exceeds the original context"


def test_the_original_context_uses_the_short_factors(tmp_path: Path) -> None:
    reference = Phi3().make_reference()
    reference.save_pretrained(tmp_path)
    num_prompt_tokens = ORIGINAL - NUM_TOKENS
    assert by_the_engine(tmp_path, num_prompt_tokens, ORIGINAL) == by_transformers(reference, num_prompt_tokens)
