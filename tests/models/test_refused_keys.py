"""Keys that a decoder does not honour are refused by name, and keys of older checkpoints mean what they did."""

from __future__ import annotations

from typing import Any

import pytest
from test_architectures import SMALL

from minisgl_core.config.hf import model_config
from minisgl_core.contracts.model import Model
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.errors import ModelFormatError
from minisgl_models.gemma2 import Gemma2ForCausalLM
from minisgl_models.gemma3 import Gemma3ForCausalLM, Gemma3ForConditionalGeneration
from minisgl_models.glm4 import Glm4ForCausalLM
from minisgl_models.granite import GraniteForCausalLM
from minisgl_models.olmo2 import Olmo2ForCausalLM
from minisgl_models.olmo3 import Olmo3ForCausalLM
from minisgl_models.phi3 import Phi3ForCausalLM

DECODERS: list[type[Model]] = [
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Glm4ForCausalLM,
    GraniteForCausalLM,
    Olmo2ForCausalLM,
    Olmo3ForCausalLM,
    Phi3ForCausalLM,
]
YARN = {"rope_type": "yarn", "factor": 4.0}


def read(decoder: type[Model], **changes: Any) -> ModelConfig:
    return model_config(decoder.standard_config({**SMALL, "architectures": [decoder.__name__], **changes}))


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_plain_config_is_supported(decoder: type[Model]) -> None:
    assert decoder.unsupported(read(decoder)) == []


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("key", ["attention_sinks", "v_head_dim", "num_experts", "mlp_bias", "partial_rotary_factor"])
def test_what_no_decoder_reads_is_refused(decoder: type[Model], key: str) -> None:
    value = {"v_head_dim": 4, "num_experts": 4, "partial_rotary_factor": 0.5}.get(key, True)
    reasons = decoder.unsupported(read(decoder, **{key: value, "num_experts_per_tok": 1}))
    is_read = {"mlp_bias": [GraniteForCausalLM], "partial_rotary_factor": [Glm4ForCausalLM, Phi3ForCausalLM]}
    assert [key in reason for reason in reasons] == ([] if decoder in is_read.get(key, []) else [True])


@pytest.mark.parametrize(
    ("decoder", "changes"),
    [
        (Gemma2ForCausalLM, {"hidden_activation": "silu"}),
        (Gemma2ForCausalLM, {"use_bidirectional_attention": True}),
        (Gemma3ForCausalLM, {"attn_logit_softcapping": 50.0}),
        (Gemma3ForCausalLM, {"use_bidirectional_attention": True}),
        (Gemma3ForConditionalGeneration, {"text_config": {**SMALL, "final_logit_softcapping": 30.0}}),
        (Glm4ForCausalLM, {"sliding_window": 8}),
        (GraniteForCausalLM, {"attn_logit_softcapping": 50.0}),
        (Olmo2ForCausalLM, {"sliding_window": 8}),
        (Phi3ForCausalLM, {"attention_bias": True}),
        (Phi3ForCausalLM, {"use_sliding_window": False, "sliding_window": 8}),
        (Phi3ForCausalLM, {"layer_types": ["full_attention"] * 3}),
        (Phi3ForCausalLM, {"rope_type": "linear", "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ],
)
def test_other_values_are_refused(decoder: type[Model], changes: dict[str, Any]) -> None:
    [reason] = decoder.unsupported(read(decoder, **changes))
    key = next(iter(changes))
    assert ("final_logit_softcapping" if key == "text_config" else key) in reason


@pytest.mark.parametrize("decoder", [Gemma3ForCausalLM, Olmo3ForCausalLM])
def test_a_rope_that_names_no_kind_of_layer_is_refused(decoder: type[Model]) -> None:
    """transformers would ignore it."""
    with pytest.raises(ModelFormatError, match=r"rope_parameters=.* must have one entry per kind of layer"):
        read(decoder, rope_parameters={"rope_theta": 1e5})


def test_ropes_of_older_gemma_3_checkpoints() -> None:
    keys = {"rope_theta": 2e6, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    config = read(Gemma3ForCausalLM, **keys)
    assert config.sliding_rope
    assert (config.rope.theta, config.rope.kind, config.rope.factor) == (2e6, "linear", 8.0)
    assert (config.sliding_rope.theta, config.sliding_rope.kind) == (2e4, "default")
    assert config.max_position == SMALL["max_position_embeddings"], "it is the scaled one"


def test_a_theta_that_transformers_4_and_5_read_apart() -> None:
    with pytest.raises(ModelFormatError, match=r"rope_theta=10000\.0 means other layers in transformers 4"):
        read(Olmo3ForCausalLM, rope_theta=10000.0)
    assert read(Olmo3ForCausalLM, rope_theta=500000.0, rope_scaling=YARN).rope.theta == 500000.0


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_names_of_longrope_in_phi_3_checkpoints(name: str) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = read(Phi3ForCausalLM, original_max_position_embeddings=32, rope_scaling={"type": name, **factors})
    assert (config.rope.kind, config.rope.factor, config.rope.original_max_position) == ("longrope", 4.0, 32)
    assert Phi3ForCausalLM.unsupported(config) == []


def test_the_text_config_of_a_multimodal_checkpoint() -> None:
    """Keys beside it hold for the whole model; a sparse one has Gemma 3's defaults."""
    raw = {
        "text_config": {"hidden_size": 2560, "eos_token_id": 9},
        "eos_token_id": [1, 106],
        "tie_word_embeddings": False,
    }
    config = model_config(
        Gemma3ForConditionalGeneration.standard_config({**raw, "architectures": ["Gemma3ForConditionalGeneration"]})
    )
    assert (config.hidden_size, config.num_q_heads, config.head_dim, config.vocab_size) == (2560, 8, 256, 262208)
    assert (config.eos_token_ids, config.tie_embeddings) == ((1, 106), False)
    assert config.sliding_windows[:7] == (4096,) * 5 + (None, 4096)
