"""The engine on Triton kernels in the interpreter: fused RoPE and KV store, and paged attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_folder
import torch

pytest.importorskip("triton")

from minisgl_core import LLM, SamplingParams


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU tests cover it there")
@pytest.mark.parametrize(("attn", "head_dim"), [("triton", 16), ("triton,triton", 16), ("triton", 80)])
def test_tokens_equal_transformers(attn: str, head_dim: int, tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(2)
    config: Any = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=head_dim, max_position_embeddings=64, initializer_range=0.2, eos_token_id=None,
    )  # fmt: skip
    reference = Qwen3ForCausalLM(config).eval()
    reference.save_pretrained(tmp_path)
    tiny_folder.save_tokenizer(tmp_path)
    prompts = [[3, 5, 8, 13, 21, 34, 55], [40, 4, 9]]
    sampling = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    options: dict[str, Any] = {
        "attn": attn,
        "ops": "triton",
        "num_pages": 24,
        "page_size": 4,
        "max_running_requests": 2,
    }
    # A budget of four tokens per step: a decode runs beside a chunk of the long prompt.
    with LLM(str(tmp_path), dtype="float32", max_prefill_length=4, **options) as llm:
        outputs = llm.generate(prompts, sampling)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = reference.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False, pad_token_id=0)
        assert output.token_ids == ids[0, len(prompt) :].tolist()
