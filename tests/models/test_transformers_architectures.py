"""Architectures without a provider in the engine: log-probabilities of tiny checkpoints, compared with transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers_cases import config_of, new_llm, saved, skip_if_unsupported

from minisgl_core import SamplingParams
from minisgl_core.llm import GenerationOutput
from minisgl_core.testing.references import random_reference

MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "head_dim": 4,  # that of RoPE
    "v_head_dim": 10,
}
WINDOWS: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "afmoe": {**MOE, **WINDOWS, "num_dense_layers": 1},
    "apertus": {},
    "arcee": {},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2},
    "biogpt": {},
    "cohere2": WINDOWS,
    "cohere2_moe": {**MOE, **WINDOWS},
    "ctrl": {},
    "cwm": WINDOWS,
    "deepseek_v2": {**MOE, **MLA, "topk_method": "greedy"},
    "deepseek_v3": {**MOE, **MLA},
    "dots1": MOE,
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "exaone4": WINDOWS,
    "exaone_moe": {**MOE, **WINDOWS},
    "flex_olmo": MOE,
    "gemma": {},
    "gemma4_text": {
        **WINDOWS,
        "global_head_dim": 12,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 101,
    },
    "glm": {},
    "glm4_moe_lite": {**MOE, **MLA},
    "gpt_bigcode": {},
    "granitemoe": MOE,
    "granite_swa": WINDOWS,
    "granitemoe_swa": {**MOE, **WINDOWS, "shared_intermediate_size": 16},
    "granitemoehybrid": {
        **MOE,
        "layer_types": ["full_attention"] * 2,
        "mamba_n_heads": 8,
        "shared_intermediate_size": 16,
    },
    "granitemoeshared": {**MOE, "shared_intermediate_size": 16},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": MOE,
    "hy_v3": MOE,
    "hyperclovax": {},
    "jais2": {},
    "laguna": {**MOE, **WINDOWS, "num_attention_heads_per_layer": [4, 8]},
    "mellum": {**MOE, **WINDOWS},
    "mimo_v2_flash": {**MOE, **WINDOWS, "swa_num_key_value_heads": 4, "v_head_dim": 6, "swa_v_head_dim": 6},
    "minicpm3": MLA,
    "minimax_m2": MOE,
    "ministral": WINDOWS,
    "ministral3": {},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmoe": MOE,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "persimmon": {},
    "phi": {},
    "phimoe": MOE,
    "seed_oss": {},
    "solar_open": MOE,
    "vaultgemma": WINDOWS,
    "youtu": {**MLA, "pad_token_id": None},  # transformers sets the embedding of its padding token to zero
}
WITHOUT_PLAN = {"biogpt", "ctrl", "gpt_bigcode", "hunyuan_v1_dense", "opt", "persimmon"}
"""Model types that transformers has no tensor-parallel plan for."""
PROMPTS = [[5, 9, 3, 7, 11], list(range(3, 28))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3)


def assert_logprobs(reference: Any, prompt: list[int], output: GenerationOutput) -> None:
    """Check that the log-probabilities of greedy tokens are those of transformers."""
    tokens = output.token_ids
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    expected = logits.float().log_softmax(-1).topk(3)
    assert output.logprobs is not None
    for position, actual in enumerate(output.logprobs):
        values = torch.tensor([each.logprob for each in actual.top])
        torch.testing.assert_close(values, expected.values[position], rtol=0, atol=1e-3)
        assert actual.token.logprob == values.max()


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_logprobs_equal_transformers(model_type: str, tmp_path: Path) -> None:
    skip_if_unsupported(model_type)
    sizes = {"num_hidden_layers": 2, "head_dim": 8}
    reference = random_reference(config_of(model_type, **{**sizes, **ARCHITECTURES[model_type]}))
    with new_llm(saved(reference, tmp_path), max_prefill_length=7, page_size=1) as llm:
        for _ in range(2):  # the second time with the radix cache
            for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, GREEDY), strict=True):
                assert_logprobs(reference, prompt, output)
        assert output.cached_tokens >= 24
        assert llm.info is not None
        assert "model_impl" in [choice[0] for choice in llm.info.choices]


def test_the_documented_model_types_are_tested() -> None:
    page = (Path(__file__).parents[2] / "docs/transformers_models.md").read_text()
    for mark, model_types in (("model types", ARCHITECTURES.keys()), ("without a plan", WITHOUT_PLAN)):
        listed = page.partition(f"<!-- test: {mark} -->\n")[2].partition("\n\n")[0]
        assert set(re.findall("`([^`]+)`", listed)) - {"model_type"} == model_types
