"""`--model-impl transformers` in the engine: paged KV, chunks, radix cache, preemption and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers_cases import config_of, new_llm, saved, skip_if_unsupported

from minisgl_core import SamplingParams
from minisgl_core.errors import InvalidValueError, ModelFormatError
from minisgl_core.testing.references import random_reference

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "stablelm": {},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "cohere": {},
    "starcoder2": {"sliding_window": 7},
    "gpt_neox": {},
}
MLA = {"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10}
MOE = {
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
PROMPTS = [[5, 9, 3, 7, 11], list(range(3, 43)), [*range(3, 33), 77], [44, 45] * 9]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def assert_greedy(reference: Any, prompt: list[int], tokens: list[int]) -> None:
    """Check that each token is transformers' most likely one after the prompt and the tokens before it."""
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    assert tokens == logits.argmax(-1).tolist()


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(random_reference(config_of("gpt2")), tmp_path_factory.mktemp("gpt2"))


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_greedy_tokens_equal_transformers(model_type: str, tmp_path: Path) -> None:
    reference = random_reference(config_of(model_type, **ARCHITECTURES[model_type]))
    model = saved(reference, tmp_path)
    # Prompts run in chunks of 7 tokens, and a pool of 96 tokens does not hold all requests.
    for options in ({"page_size": 1, "num_pages": 97}, {"page_size": 16, "num_pages": 7}):
        with new_llm(model, max_prefill_length=7, **options) as llm:
            first, again = (llm.generate(PROMPTS, GREEDY) for _ in range(2))
            assert llm.stats.num_preemptions > 0
            for prompt, output, repeated in zip(PROMPTS, first, again, strict=True):
                assert_greedy(reference, prompt, output.token_ids)
                assert repeated.token_ids == output.token_ids
            assert llm.generate(PROMPTS[1], GREEDY)[0].cached_tokens >= 32
            assert llm.info is not None
            assert next(choice for choice in llm.info.choices if choice[0] == "model_impl")[1] == "transformers"


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("hunyuan_v1_moe", {"num_experts": 4, "head_dim": 8}),  # reads the dtype of a linear layer's weight
        ("modernbert-decoder", {"local_attention": 8}),  # its config requires a padding token
        ("laguna", {"head_dim": 8, "num_attention_heads_per_layer": [4, 8, 4]}),  # layers with more query heads
        ("minicpm3", MLA),  # values of another size than keys
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 5}),  # false by default
    ],
)
def test_unusual_modules_and_configs(model_type: str, changes: dict[str, Any], tmp_path: Path) -> None:
    reference = random_reference(config_of(model_type, **changes))
    with new_llm(saved(reference, tmp_path), model_impl="transformers") as llm:
        assert_greedy(reference, PROMPTS[1], llm.generate(PROMPTS[1], GREEDY)[0].token_ids)


def test_an_architecture_named_after_its_config_class_runs(tmp_path: Path) -> None:
    pytest.importorskip("transformers.models.internlm3")
    reference = random_reference(config_of("internlm3", head_dim=8, attention_bias=True, mlp_bias=True))
    model = saved(reference, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    published = {"qkv_bias": config.pop("attention_bias"), "bias": config.pop("mlp_bias")}
    config |= {"architectures": ["InternLM3ForCausalLM"], **published}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with new_llm(model) as llm:
        assert_greedy(reference, PROMPTS[1], llm.generate(PROMPTS[1], GREEDY)[0].token_ids)


def test_llama_equals_its_provider(tmp_path: Path) -> None:
    reference = random_reference(config_of("llama"))
    model, tokens = saved(reference, tmp_path), {}
    for model_impl in ("auto", "minisgl", "transformers"):
        with new_llm(model, model_impl=model_impl) as llm:
            tokens[model_impl] = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
            assert llm.info is not None
            reported = [choice for choice in llm.info.choices if choice[0] == "model_impl"]
            assert bool(reported) == (model_impl == "transformers")
    assert tokens["transformers"] == tokens["minisgl"] == tokens["auto"]


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        pytest.param("starcoder2", {"sliding_window": 7}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {**MOE, **MLA, "q_lora_rank": 16, "head_dim": 4}, marks=pytest.mark.slow),
        pytest.param("deepseek_v2", {**MOE, **MLA, "head_dim": 4, "q_lora_rank": None}, marks=pytest.mark.nightly),
        pytest.param("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 16}, marks=pytest.mark.nightly),
        pytest.param("olmoe", MOE, marks=pytest.mark.nightly),  # norms of all heads, so that q, k and v are gathered
        pytest.param("afmoe", {**MOE, "head_dim": 8}, marks=pytest.mark.nightly),  # attention is not sharded
        pytest.param("aria_text", {"moe_num_experts": 4, "moe_topk": 2}, marks=pytest.mark.nightly),
    ],
)
def test_two_ranks_generate_the_tokens_of_one(
    model_type: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_if_unsupported(model_type, needs_plan=True)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    reference = random_reference(config_of(model_type, **changes))
    with new_llm(saved(reference, tmp_path), tp=2, model_impl="transformers", max_prefill_length=16) as llm:
        for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, GREEDY), strict=True):
            assert_greedy(reference, prompt, output.token_ids)


def test_checkpoints_of_only_the_backbone_load(gpt2: str, tmp_path: Path) -> None:
    """The published GPT-2 has names without ``transformer.``, and attention masks."""
    tensors = {name.removeprefix("transformer."): each for name, each in load_file(f"{gpt2}/model.safetensors").items()}
    tensors |= {"h.0.attn.bias": torch.ones(1, 1, 128, 128), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(Path(gpt2, "config.json").read_text())
    reference = AutoModelForCausalLM.from_pretrained(gpt2)
    with new_llm(str(tmp_path)) as llm:
        assert_greedy(reference, PROMPTS[1], llm.generate(PROMPTS[1], GREEDY)[0].token_ids)


def test_an_lm_head_that_differs_from_the_embedding_is_used(gpt2: str, tmp_path: Path) -> None:
    tensors = load_file(f"{gpt2}/model.safetensors")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].flip(0).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(Path(gpt2, "config.json").read_text())
    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    with new_llm(str(tmp_path)) as llm:
        assert_greedy(reference, PROMPTS[1], llm.generate(PROMPTS[1], GREEDY)[0].token_ids)


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("bloom", {}, "call transformers' AttentionInterface 0 times, not once each"),
        ("xglm", {}, "call transformers' AttentionInterface 0 times"),  # checks the shape of its mask
        ("gptj", {}, "does not use transformers' AttentionInterface"),  # has a table of attention classes
        ("falcon", {"alibi": True}, "ALiBi"),
        ("mamba", {}, "state per request"),
        (
            "mamba",
            {"hidden_size": 2**14, "intermediate_size": 2**15},
            "state per request",
        ),  # of convolutions, not experts
        ("jamba", {}, "state per request"),
        ("minimax", {"layer_types": ["linear_attention", "full_attention", "full_attention"]}, "state per request"),
        (
            "bamba",
            {"mamba_n_heads": 8, "mamba_d_head": 8},
            "state per request",
        ),  # its config.json has {"__float__": "Infinity"}
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "state per request"),
        ("qwen3_next", {"num_experts": 4}, "state per request"),
        ("llama4_text", {"head_dim": 8}, "chunked attention"),
        ("deepseek_v32", {**MLA, "q_lora_rank": 16, "index_head_dim": 8, "n_routed_experts": 4}, "passes indices"),
        ("deepseek_v4", {"layer_types": ["heavily_compressed_attention"] * 3, "head_dim": 8}, "compressed tokens"),
        ("glm_moe_dsa", {**MLA, "q_lora_rank": 16, "index_head_dim": 8, "n_routed_experts": 4}, "passes indices"),
        (
            "gemma4_text",
            {"num_kv_shared_layers": 1, "layer_types": ["sliding_attention", *["full_attention"] * 2]},
            "layers reuse K and V of earlier ones",
        ),
        ("jetmoe", {}, "reads tensors on the CPU"),
        (
            "longcat_flash",
            {**MLA, "num_layers": 2, "q_lora_rank": 16, "n_routed_experts": 4},
            "reads tensors on the CPU",
        ),
        ("t5", {}, "no causal LM T5ForConditionalGeneration"),
        (
            "qwen2_moe",
            {
                "layer_types": ["sliding_attention", *["full_attention"] * 2],
                "use_sliding_window": False,
                "num_experts": 4,
            },
            r"layers\.0\.self_attn has a sliding window of 0 tokens",
        ),
        ("bert", {"is_decoder": True}, "no causal LM BertForMaskedLM"),
        ("stablelm", {"is_causal": False}, "is_causal"),
        ("mpt", {}, "one flat config; that of mpt has attn_config"),
        (
            "pegasus",
            {"decoder_layers": 3},
            "its index among them",
        ),  # counts positions itself; its config has no bos_token_id
    ],
)
def test_unsupported_models_are_refused(model_type: str, changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    config = config_of(model_type, **changes)
    names = {
        "mamba": "Mamba",
        "bert": "BertForMaskedLM",
        "t5": "T5ForConditionalGeneration",
        "llama4_text": "Llama4",
        "deepseek_v32": "DeepseekV32",
        "deepseek_v4": "DeepseekV4",
        "glm_moe_dsa": "GlmMoeDsa",
        "gemma4_text": "Gemma4",
        "gptj": "GPTJ",
        "jetmoe": "JetMoe",
        "longcat_flash": "LongcatFlash",
        "qwen2_moe": "Qwen2Moe",
        "qwen3_next": "Qwen3Next",
        "minimax": "MiniMax",
        "xglm": "XGLM",
        "stablelm": "StableLm",
    }
    name = names.get(model_type, model_type.capitalize())
    config.architectures = [name if "For" in name else f"{name}ForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelFormatError, match=reason):
        new_llm(str(tmp_path), dummy_weight=True, model_impl="transformers")


@pytest.mark.parametrize("model_type", ["roberta", "camembert"])  # the tied embedding has another name in each
def test_positions_after_a_padding_token_are_refused(model_type: str, tmp_path: Path) -> None:
    reference = random_reference(config_of(model_type, is_decoder=True))
    with pytest.raises(ModelFormatError, match="the positions of a sequence are not 0, 1, 2"):
        new_llm(saved(reference, tmp_path))


def test_batch_dependent_rope_frequencies_are_refused(tmp_path: Path) -> None:
    """LongRoPE of transformers uses the long factors for a whole batch if one sequence exceeds the original context."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.5, 3.0, 5.0, 9.0]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **factors}
    reference = random_reference(config_of("phi3", rope_parameters=rope, original_max_position_embeddings=64))
    model = saved(reference, tmp_path)
    with pytest.raises(ModelFormatError, match=r"the other tokens of the batch|reads tensors on the CPU") as caught:
        new_llm(model, model_impl="transformers")
    if "--max-seq-len-override" not in str(caught.value):
        return  # transformers 5.17 reads the largest position on the host, so the model is refused for any context
    with new_llm(model, model_impl="transformers", max_seq_len_override=64) as llm:
        for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, GREEDY), strict=True):
            assert_greedy(reference, prompt, output.token_ids)


def test_gguf_files_are_refused(smollm2_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="model_type is missing"):
        new_llm(str(smollm2_path), model_impl="transformers")


def test_unknown_architectures_name_the_flag(tmp_path: Path) -> None:
    config = {**config_of("gpt2").to_dict(), "architectures": ["MyForCausalLM"], "model_type": "mine"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelFormatError, match=r"no provider is installed for MyForCausalLM.*--model-impl transformers"
    ):
        new_llm(str(tmp_path), dummy_weight=True)


def test_quantized_layers_are_refused(gpt2: str) -> None:
    with pytest.raises(InvalidValueError, match=r"--quantization.*must be none with --model-impl transformers"):
        new_llm(gpt2, quantization="fp8")


def test_ternary_weights_are_refused(gpt2: str, tmp_path: Path) -> None:
    config = json.loads(Path(gpt2, "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(load_file(f"{gpt2}/model.safetensors"), tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFormatError, match="quant_method 'bitnet'"):
        new_llm(str(tmp_path))


def test_pipeline_stages_are_refused_with_the_flag(gpt2: str) -> None:
    with pytest.raises(InvalidValueError, match=r"--pp=2 .*must be 1 with --model-impl transformers\. Use --tp, or"):
        new_llm(gpt2, pp=2)
