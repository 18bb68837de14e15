"""The whole engine on every architecture: greedy tokens equal transformers."""

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
"""The second prompt shares a prefix with the first, and ends in its third page of 16 tokens."""

ARCHITECTURES = architectures.Small.__subclasses__()
"""The kit's test class of each architecture, whose config this test uses."""

OPTIONS: dict[str, dict[str, Any]] = {
    "page-1": {"page_size": 1, "num_pages": 90, "max_prefill_length": 16, "disable_overlap": True},
    "page-16": {"page_size": 16, "num_pages": 6, "max_prefill_length": 24},
    "tp-2": {"page_size": 16, "num_pages": 6, "max_prefill_length": 24, "tp": 2},
}
"""The pool is too small for all requests at once, and prompts are split into chunks."""

ON_TWO_RANKS = {"gemma2", "gpt_oss", "qwen3"}
"""Model types that CI runs on two ranks; `nox -s nightly` runs the others. They have soft caps and tied embeddings; attention
sinks, windows and experts; norms of Q and K. `ModelTests` compares each architecture's logits on two and four ranks."""


def marks(architecture: type[architectures.Small], option: str) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.nightly,) if option == "tp-2" and architecture.model_type not in ON_TWO_RANKS else ()


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        pytest.param(each, options, id=f"{each.model_type}-{name}", marks=marks(each, name))
        for each in ARCHITECTURES
        for name, options in OPTIONS.items()
    ],
)
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
    assert all(output.cached_tokens >= 16 for output in outputs[1]), "prefixes are cached in the second run"
    for output in (output for batch in outputs for output in batch):
        with torch.inference_mode():
            ids = torch.tensor([output.prompt_token_ids + output.token_ids[:-1]])
            logits = reference(ids, logits_to_keep=NUM_TOKENS).logits[0]
        assert output.token_ids == logits.argmax(-1).tolist()
