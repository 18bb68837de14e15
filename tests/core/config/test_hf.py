from __future__ import annotations

import math
from typing import Any

import pytest

from minisgl_core.config.hf import model_config
from minisgl_core.config.keys import check_layer_counts
from minisgl_core.errors import ModelFormatError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}


def read(architecture: str = "LlamaForCausalLM", **changes: Any) -> Any:
    raw = {**LLAMA, "architectures": [architecture], **changes}
    return model_config({key: value for key, value in raw.items() if value is not ...})


def test_plain_llama() -> None:
    config = read()
    assert (config.architecture, config.head_dim, config.num_kv_heads) == ("LlamaForCausalLM", 8, 2)
    assert (config.dtype, config.rms_norm_eps, config.max_position) == ("bfloat16", 1e-5, 1024)
    assert (config.tie_embeddings, config.qkv_bias, config.o_bias, config.mlp_bias) == (False, False, False, False)
    assert config.sliding_windows == (None,) * 4
    assert config.moe is None
    assert (config.rope.kind, config.rope.theta, config.rope.rotary_dim) == ("default", 10000.0, 8)
    assert config.raw["vocab_size"] == 100


def test_transformers_4_and_5_formats_are_equivalent() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
    four = read(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling})
    five = read(
        rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling}, torch_dtype=..., dtype="bfloat16"
    )
    assert four == five
    assert (four.rope.kind, four.rope.theta, four.rope.factor, four.max_position) == ("llama3", 5e5, 8.0, 1024)
    older = read(rope_scaling={"type": "linear", "factor": 2.0})
    assert (older.rope.kind, older.rope.factor, older.max_position) == ("linear", 2.0, 2048)


def test_yarn_extends_the_context() -> None:
    qwen = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert read("Qwen2ForCausalLM", rope_scaling=qwen).max_position == 4096
    assert read("Qwen2ForCausalLM", rope_scaling=qwen, max_position_embeddings=5120).max_position == 5120
    implied = read(rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 256})
    assert (implied.rope.factor, implied.max_position) == (4.0, 1024)
    deepseek = read(
        rope_scaling={**qwen, "mscale": 1.0, "mscale_all_dim": 0.5, "attention_factor": None, "beta_fast": None}
    )
    assert (deepseek.rope.mscale, deepseek.rope.mscale_all_dim, deepseek.rope.beta_fast) == (1.0, 0.5, 32.0)


@pytest.mark.parametrize(
    ("changes", "ids"),
    [
        ({}, ()),
        ({"eos_token_id": 2}, (2,)),
        ({"eos_token_id": [2, 5]}, (2, 5)),
        ({"eos_token_id": None}, ()),
        ({"eos_token_id": [-1, 2, 100]}, (2,)),
    ],
)
def test_eos_ids(changes: dict[str, Any], ids: tuple[int, ...]) -> None:
    raw = {**LLAMA, **changes}
    assert model_config(raw).eos_token_ids == ids
    assert model_config(raw, {"eos_token_id": [2, 9]}).eos_token_ids == tuple(dict.fromkeys((*ids, 2, 9)))
    assert model_config(raw, {"eos_token_id": 9}).eos_token_ids == (*ids, 9)
    assert model_config(raw, {"eos_token_id": 9}, 8).eos_token_ids == (*ids, 9, 8)
    assert model_config(raw, tokenizer_eos=100).eos_token_ids == ids


def test_attention_and_mlp_biases() -> None:
    assert read(attention_bias=True).qkv_bias
    assert read(attention_bias=True).o_bias
    assert read(mlp_bias=True).mlp_bias
    qwen2 = read("Qwen2ForCausalLM")
    assert (qwen2.qkv_bias, qwen2.o_bias) == (True, False)
    qwen3 = read("Qwen3ForCausalLM", attention_bias=True)
    assert (qwen3.qkv_bias, qwen3.o_bias) == (True, True)


def test_defaults_are_those_of_transformers_classes() -> None:
    assert read("Qwen3ForCausalLM").head_dim == 128
    assert read("MistralForCausalLM").sliding_windows == (4096,) * 4
    assert read("MistralForCausalLM", sliding_window=None).sliding_windows == (None,) * 4
    assert read(num_key_value_heads=...).num_kv_heads == 8
    assert read(head_dim=None).head_dim == 8
    assert read(torch_dtype=...).dtype == "float32"


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_sliding_windows_of_qwen(architecture: str) -> None:
    def windows(**changes: Any) -> Any:
        return read(architecture, **{"sliding_window": 32, "max_window_layers": 3, **changes}).sliding_windows

    assert windows(use_sliding_window=False) == (None,) * 4
    assert windows(use_sliding_window=True) == (None, None, None, 32)
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert windows(use_sliding_window=True, layer_types=kinds) == (32, None, None, 32)
    assert windows(use_sliding_window=False, layer_types=["full_attention"] * 4) == (None,) * 4


def test_qwen3_moe_uses_sliding_windows_in_all_layers() -> None:
    windows = {"sliding_window": 32, "max_window_layers": 3}
    assert read("Qwen3MoeForCausalLM", **windows).sliding_windows == (None,) * 4
    assert read("Qwen3MoeForCausalLM", **windows, use_sliding_window=True).sliding_windows == (32,) * 4


def test_sliding_windows_of_other_architectures() -> None:
    """Windows apply if they are set, as few configs have a key that enables them."""
    kinds = ["sliding_attention", "full_attention"] * 2
    assert read("Phi3ForCausalLM", sliding_window=2047).sliding_windows == (2047,) * 4
    assert read("Phi3ForCausalLM", sliding_window=None).sliding_windows == (None,) * 4
    assert read("Gemma2ForCausalLM", sliding_window=32, layer_types=kinds).sliding_windows == (32, None, 32, None)
    assert read("OtherForCausalLM", sliding_window=32, use_sliding_window=False).sliding_windows == (None,) * 4
    assert read("OtherForCausalLM", sliding_window=32, max_window_layers=2).sliding_windows == (32,) * 4
    assert read("LlamaForCausalLM", sliding_window=32).sliding_windows == (None,) * 4, "as in transformers"


def test_unknown_activations_and_rope_kinds_are_kept_for_plugins() -> None:
    assert read().hidden_act == "silu"
    assert read("GemmaForCausalLM", hidden_act="gelu_pytorch_tanh").hidden_act == "gelu_pytorch_tanh"
    gemma3 = read("Gemma3ForCausalLM", hidden_activation="gelu_pytorch_tanh")
    assert gemma3.hidden_act == "gelu_pytorch_tanh", "Gemma 2 and 3 have another key"
    long = read("Phi3ForCausalLM", rope_theta=5e4, rope_scaling={"rope_type": "su", "short_factor": [1.0]})
    assert (long.rope.kind, long.rope.theta, long.max_position) == ("su", 5e4, 1024)
    kinds = {"full_attention": {"rope_theta": 1e6}, "chunked_attention": {"rope_theta": 1e4}}
    other = read("OtherForCausalLM", rope_parameters=kinds)
    assert (other.rope.kind, other.rope.rotary_dim, other.raw["rope_parameters"]) == ("per_layer", 8, kinds)


def test_sliding_layers_have_their_own_rope() -> None:
    """If the config has a RoPE per layer type, max_position_embeddings is the scaled context length."""
    full = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    config = read(rope_parameters={"full_attention": full, "sliding_attention": {"rope_theta": 1e4}})
    assert (config.rope.kind, config.rope.theta, config.rope.factor) == ("linear", 1e6, 8.0)
    assert (config.sliding_rope.kind, config.sliding_rope.theta) == ("default", 1e4)
    assert config.max_position == 1024
    assert read(rope_parameters=full).sliding_rope is None
    assert read(rope_parameters=full).max_position == 8192


@pytest.mark.parametrize("is_own_key", [False, True])
def test_longrope(is_own_key: bool) -> None:
    """The original context length is outside the RoPE parameters in transformers 4, and may be among them in 5."""
    original, factors = (
        {"original_max_position_embeddings": 256},
        {"short_factor": [1, 1, 1, 2], "long_factor": [1, 2, 4, 8]},
    )
    rope = {"rope_type": "longrope", **factors, **(original if is_own_key else {})}
    config = read("Phi3ForCausalLM", rope_scaling=rope, **({} if is_own_key else original))
    assert (config.rope.factor, config.rope.original_max_position, config.max_position) == (4.0, 256, 1024)
    assert (config.rope.short_factors, config.rope.long_factors) == ((1.0, 1.0, 1.0, 2.0), (1.0, 2.0, 4.0, 8.0))
    assert read(rope_scaling={"rope_type": "longrope", **factors}).rope.factor == 1.0


def test_soft_caps_sinks_and_value_head_dims_are_read() -> None:
    gemma = read("OtherForCausalLM", attn_logit_softcapping=50.0, v_head_dim=16, attention_sinks=True)
    assert (gemma.soft_cap, gemma.value_head_dim, gemma.has_sinks) == (50.0, 16, True)
    plain = read(attn_logit_softcapping=None)
    assert (plain.soft_cap, plain.value_head_dim, plain.has_sinks) == (None, None, False)
    with pytest.raises(ModelFormatError, match="attn_logit_softcapping=-1 is not above 0"):
        read("OtherForCausalLM", attn_logit_softcapping=-1)


def test_moe_configs() -> None:
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    config = read("Qwen3MoeForCausalLM", **moe, decoder_sparse_step=2, mlp_only_layers=[3])
    assert (config.moe.num_experts, config.moe.top_k, config.moe.intermediate_size) == (8, 2, 16)
    assert config.moe.norm_topk_prob
    assert config.moe.dense_layers == {0, 2, 3}
    five = {**moe, "num_local_experts": moe["num_experts"]}
    del five["num_experts"]
    assert read("Qwen3MoeForCausalLM", **five).moe == read("Qwen3MoeForCausalLM", **moe).moe
    assert read("Qwen3MoeForCausalLM", **moe).moe.dense_layers == frozenset()
    assert read("MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2).moe.intermediate_size == 128
    assert read("OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2).moe.intermediate_size == 128
    assert read("Qwen3MoeForCausalLM", num_experts=4, num_experts_per_tok=2).moe.intermediate_size == 768


def test_partial_rotary_factor() -> None:
    def rotary_dim(**changes: Any) -> int:
        return read("OtherForCausalLM", head_dim=32, **changes).rope.rotary_dim

    assert rotary_dim(partial_rotary_factor=0.5) == 16
    assert rotary_dim(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.25}) == 8


def test_yarn_in_rope_scaling_keeps_other_rope_parameters() -> None:
    """transformers reads rope_scaling alone; other keys of rope_parameters must not get lost."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    alone = read(rope_scaling=yarn)
    assert read(rope_scaling=yarn, rope_parameters={"rope_type": "default", "rope_theta": 1e4}) == alone
    assert read(rope_scaling=yarn, rope_parameters={"rope_theta": 1e4, **yarn}) == alone
    theta = read(rope_theta=1e6, rope_scaling=yarn, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert (theta.rope.kind, theta.rope.theta) == ("yarn", 1e6)
    with pytest.raises(ModelFormatError, match=r"rope_theta=1000000\.0 and rope_scaling has rope_theta=10000\.0"):
        read(rope_scaling=yarn, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    with pytest.raises(ModelFormatError, match=r"factor=2\.0 and rope_scaling has factor=4\.0"):
        read(rope_scaling=yarn, rope_parameters={**yarn, "factor": 2.0})


def test_original_context_outside_the_rope_parameters_is_read() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert read(rope_scaling=yarn, original_max_position_embeddings=256).rope.original_max_position == 256
    assert read(rope_scaling={**yarn, "rope_type": "dynamic"}).rope.original_max_position == 1024


def test_dynamic_ntk_is_limited_to_the_original_context() -> None:
    config = read(rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    assert (config.rope.kind, config.max_position) == ("dynamic", 1024)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": []}, "architectures is missing"),
        ({"vocab_size": ...}, "vocab_size is missing"),
        ({"hidden_size": "64"}, "hidden_size='64' is not a number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 is not a whole number"),
        ({"intermediate_size": 1.5}, "intermediate_size=1.5 is not a whole number"),
        ({"num_key_value_heads": 3}, "num_attention_heads=8 is not a multiple of num_key_value_heads=3"),
        ({"hidden_size": 65}, "head_dim is missing"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"head_dim": 10**9}, "head_dim=1000000000 is not a whole number of at least 1 and at most 65536"),
        ({"num_attention_heads": 10**9, "head_dim": 8}, "num_attention_heads=1000000000 is not a whole number"),
        ({"num_experts": 10**6, "num_experts_per_tok": 1}, "num_experts=1000000 times num_hidden_layers"),
        (
            {"num_experts": 65, "num_experts_per_tok": 1, "num_hidden_layers": 1024},
            "num_experts=65 times num_hidden_layers=1024 is over 65536",
        ),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>'"),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn' is not an object with parameters"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "rope_parameters: low_freq_factor is missing"),
        ({"rope_parameters": {"freq_factors": [1.0], "rope_theta": 1e4}}, "freq_factors has 1 entries, not 4"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4}}, "long_factor has 0 entries, not 4"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 3}}, "short_factor has 3 entries, not 4"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [0] * 4}}, "short_factor=[0, 0, 0, 0] is not"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": "1"}}, "short_factor='1' is not a list"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling: factor=0 is not above 0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": math.inf}}, "rope_scaling: factor=inf"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "rope_theta": 1}}, "rope_theta=1 is not above 1"),
        ({"rope_theta": 0}, "config: rope_theta=0 is not above 1"),
        (
            {"architectures": ["OtherForCausalLM"], "head_dim": 8, "partial_rotary_factor": 0.4},
            "3 rotary dimensions; their number must be",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types=['full_attention'] must have"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window is not set or use_sliding_window is false"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "use_sliding_window": 1},
            "use_sliding_window=1 is neither true nor false",
        ),
        ({"is_causal": False}, "is_causal=False is not supported by LlamaForCausalLM; only true is"),
        (
            {
                "architectures": ["Qwen3MoeForCausalLM"],
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            "contradicts sliding_window=8, which Qwen3MoeForCausalLM has in all layers",
        ),
        ({"num_experts": 4}, "num_experts_per_tok is missing"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok=5 is greater than num_experts=4"),
        ({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 0}, "moe_intermediate_size=0"),
        ({"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": 3}, "mlp_only_layers=3 is not a list"),
    ],
)
def test_invalid_config_values_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFormatError) as error:
        model_config({key: value for key, value in {**LLAMA, **changes}.items() if value is not ...})
    assert message in str(error.value)


def test_invalid_ids_in_the_generation_config_name_the_file() -> None:
    with pytest.raises(ModelFormatError, match=r"^generation_config: eos_token_id='</s>'"):
        model_config(LLAMA, {"eos_token_id": "</s>"})


def test_numbers_of_layers_are_checked_in_nested_configs() -> None:
    config: dict[str, Any] = {"n_layers": 1025}
    for _ in range(2000):  # more than Python's recursion limit
        config = {"num_layers": 1024, "text_config": config}
    with pytest.raises(ModelFormatError, match="config: n_layers=1025 is not at most 1024"):
        check_layer_counts(config)
