"""Every architecture on a GPU in bfloat16: errors relative to float32 are about those of transformers in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import test_architectures as architectures
import test_transformers_engine as by_transformers
import torch
from transformers import AutoConfig

from minisgl_core import LLM, SamplingParams
from minisgl_core.errors import MinisglError
from minisgl_core.testing.references import random_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 512
WIDER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "max_position_embeddings": 1024,
}
RESIZED = {"head_dim": 64, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "sliding_window": 33}
"""Sizes that GPU kernels need, for architectures with these keys."""
SAMPLING = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0, prompt_logprobs=0)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
RANDOM = torch.randint(3, VOCAB, (6, 300), generator=torch.Generator().manual_seed(4)).tolist()
PROMPTS = [RANDOM[0], RANDOM[1][:1], RANDOM[2][:17], RANDOM[0][:64] + RANDOM[3][:5], RANDOM[4][:130], RANDOM[5][:33]]


def gpu_config(model_type: str, changes: dict[str, Any]) -> Any:
    resized = {name: value for name, value in RESIZED.items() if changes.get(name)}
    # transformers 5.17 does not read swiglu_limit in the config.
    changes = {name: value for name, value in changes.items() if name not in ("layer_types", "swiglu_limit")}
    return AutoConfig.for_model(model_type, **{**architectures.SMALL, "pad_token_id": 0, **changes, **WIDER, **resized})


CONFIGS = {each.model_type: each.changes for each in reversed(architectures.Small.__subclasses__())}
del CONFIGS["gemma3"]  # its text model is gemma3_text
OTHERS = {name: changes for name, changes in by_transformers.ARCHITECTURES.items() if "layers" not in str(changes)}
EXPERTS: dict[str, dict[str, Any]] = {
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
}

HEADS_OF_192: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""Sizes of DeepSeek-V3's heads."""


def logprobs_of(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(torch.tensor([ids[:-1]], device=DEVICE)).logits[0].double()
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:], device=DEVICE)[:, None])[:, 0].cpu()


def check_spread(model_type: str, changes: dict[str, Any], folder: Path, **options: Any) -> None:
    """Compare log-probabilities of prompts, which are computed in chunks, and of greedy tokens."""
    reference = random_reference(gpu_config(model_type, changes)).to(DEVICE)
    reference.save_pretrained(folder)
    try:
        llm = LLM(str(folder), dtype="bfloat16", max_prefill_length=100, page_size=16, num_pages=256, **options)
    except MinisglError as error:
        pytest.skip(str(error))
    with llm:
        outputs = llm.generate(PROMPTS, SAMPLING)
    ours, wanted, theirs = [], [], []
    rounded = random_reference(gpu_config(model_type, changes)).to(DEVICE, torch.bfloat16)
    for output in outputs:
        assert output.logprobs is not None
        entries = [*(output.prompt_logprobs or [])[1:], *output.logprobs]
        ours += [entry.token.logprob for entry in entries if entry is not None]
        ids = output.prompt_token_ids + output.token_ids
        wanted.append(logprobs_of(reference, ids))
        theirs.append(logprobs_of(rounded, ids))
    float32 = torch.cat(wanted)
    found = (torch.tensor(ours, dtype=torch.float64) - float32).abs()
    spread = (torch.cat(theirs) - float32).abs()
    assert len(ours) == sum(map(len, PROMPTS)) - len(PROMPTS) + 24 * len(PROMPTS)
    assert found.mean() <= 1.25 * spread.mean(), (found.mean(), spread.mean())
    assert found.quantile(0.99) <= 1.5 * spread.quantile(0.99), (found.quantile(0.99), spread.quantile(0.99))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")
@pytest.mark.timeout(300)
class TestOnOneGpu:
    @pytest.mark.parametrize("attn", ["auto", "triton", "fi"])
    @pytest.mark.parametrize("model_type", CONFIGS)
    def test_bfloat16_errors_equal_those_of_transformers(self, model_type: str, attn: str, tmp_path: Path) -> None:
        check_spread(model_type, CONFIGS[model_type], tmp_path, attn=attn)

    @pytest.mark.parametrize("model_type", OTHERS)
    def test_errors_of_the_transformers_backend_are_as_small(self, model_type: str, tmp_path: Path) -> None:
        check_spread(model_type, OTHERS[model_type], tmp_path, model_impl="transformers")

    @pytest.mark.parametrize("model_type", EXPERTS)
    def test_experts_of_the_transformers_backend_run(self, model_type: str, tmp_path: Path) -> None:
        """They run with CUDA graphs if these can be captured, and else without."""
        check_spread(model_type, EXPERTS[model_type], tmp_path, model_impl="transformers")

    def test_latent_attention_runs_on_triton_with_cuda_graphs(self, tmp_path: Path) -> None:
        options = {"model_impl": "transformers", "attn": "triton", "cuda_graph_max_bs": 8}
        check_spread("minicpm3", HEADS_OF_192, tmp_path, **options)

    @pytest.mark.parametrize("model_type", ["stablelm", "cohere", "gpt_neox"])
    def test_cuda_graphs_keep_the_tokens_of_transformers_modules(self, model_type: str, tmp_path: Path) -> None:
        random_reference(gpu_config(model_type, {})).save_pretrained(tmp_path)
        found = []
        for limits in ({"cuda_graph_max_bs": 0}, {"cuda_graph_max_bs": 8}):
            with LLM(str(tmp_path), dtype="float32", num_pages=256, page_size=16, **limits) as llm:
                found.append([output.token_ids for output in llm.generate(PROMPTS, GREEDY)])
        assert found[0] == found[1]
