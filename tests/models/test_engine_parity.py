"""The whole engine on every architecture: its greedy tokens are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import test_architectures as architectures
import torch

from minisgl_core import LLM, SamplingParams

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
RANDOM = torch.randint(3, 97, (3, 40), generator=torch.Generator().manual_seed(4)).tolist()
PROMPTS = [RANDOM[0], RANDOM[0][:33] + RANDOM[1][:5], RANDOM[1][:1], RANDOM[2][:20]]
"""The second begins as the first does, and reaches into its third page of 16."""

ARCHITECTURES = architectures.Small.__subclasses__()
"""The test class of each, whose config is that of this test."""

OPTIONS: dict[str, dict[str, Any]] = {
    "page-1": {"page_size": 1, "num_pages": 90, "max_prefill_length": 16, "disable_overlap": True},
    "page-16": {"page_size": 16, "num_pages": 6, "max_prefill_length": 24},
    "tp-2": {"page_size": 16, "num_pages": 6, "max_prefill_length": 24, "tp": 2},
}
"""The pool is too small for all requests at once, and prompts are split into chunks."""


@pytest.mark.parametrize(
    "options",
    [*(OPTIONS[name] for name in ("page-1", "page-16")), pytest.param(OPTIONS["tp-2"], marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda each: each.model_type)
def test_greedy_tokens(
    architecture: type[architectures.Small], options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    reference = architecture().make_reference()
    reference.save_pretrained(tmp_path)
    fixed: dict[str, Any] = {"dtype": "float32", "platform": "cpu", "cache": "radix", "max_seq_len_override": 64}
    with LLM(str(tmp_path), **fixed, **options) as llm:
        outputs = [llm.generate(PROMPTS, GREEDY), llm.generate(PROMPTS[:2], GREEDY)]
        assert llm.stats.num_preemptions > 0, "the pool is large enough for all"
    assert all(output.cached_tokens >= 16 for output in outputs[1]), "the second time, prefixes are cached"
    for output in (output for batch in outputs for output in batch):
        with torch.inference_mode():
            ids = torch.tensor([output.prompt_token_ids + output.token_ids[:-1]])
            logits = reference(ids, logits_to_keep=NUM_TOKENS).logits[0]
        assert output.token_ids == logits.argmax(-1).tolist()
