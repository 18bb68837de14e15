"""RoPE frequencies compared with transformers, and cos and sin tables beyond the original context."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from minisgl_core.config.hf import model_config
from minisgl_core.contracts.communicator import SingleRank
from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.ops import Ops
from minisgl_core.errors import OutOfMemoryError
from minisgl_core.layers.rotary import RotaryEmbedding, inverse_frequencies

CONTEXT = 64


def rope_config(**rope: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=10,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        architectures=["LlamaForCausalLM"],
        rope_scaling=rope,
        rope_theta=500.0,
    )


def build(dtype: torch.dtype = torch.float32) -> BuildContext:
    device = torch.device("cpu")
    return BuildContext(SingleRank(), Ops.of(device, dtype), device, dtype)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 3.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "beta_fast": 8, "beta_slow": 0.5},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "attention_factor": 1.3},
        {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 32,
            "mscale": 0.7,
            "mscale_all_dim": 0.2,
        },
    ],
    ids=lambda rope: "-".join(str(value) for value in rope.values()),
)
def test_frequencies_equal_transformers(rope: dict[str, Any]) -> None:
    config = rope_config(**rope)
    expected, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    frequencies, my_scale = inverse_frequencies(model_config(config.to_dict()).rope)
    assert torch.allclose(frequencies, expected, rtol=1e-6, atol=0)
    assert my_scale == pytest.approx(scale, rel=1e-6)
    plain, _ = inverse_frequencies(model_config(rope_config(rope_type="default").to_dict()).rope)
    assert not torch.allclose(frequencies, plain)


LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 16,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [1.5 + i for i in range(8)],
}


@pytest.mark.parametrize("attention_factor", [None, 1.3])
@pytest.mark.parametrize("context", [8, 16, 17, CONTEXT])
def test_longrope_equals_transformers(context: int, attention_factor: float | None) -> None:
    """The long factors apply if the context is longer than the original one."""
    rope = LONGROPE if attention_factor is None else {**LONGROPE, "attention_factor": attention_factor}
    config = rope_config(**rope)
    expected, scale = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=context)
    mine = model_config(config.to_dict())
    assert mine.max_position == CONTEXT
    found = RotaryEmbedding(mine.rope, context, build())
    angles = torch.outer(torch.arange(context), expected)
    assert torch.allclose(found.cos, angles.cos() * scale, atol=1e-5)
    assert torch.allclose(found.sin, angles.sin() * scale, atol=1e-5)
    assert scale == (attention_factor or pytest.approx(math.sqrt(1.5)))


def test_table_is_cos_and_sin_of_the_angles() -> None:
    rope = model_config(rope_config(rope_type="default").to_dict()).rope
    positions = torch.tensor([0, 3, 63, 3])
    cos, sin = RotaryEmbedding(rope, CONTEXT, build()).forward(positions)
    for row, position in enumerate(positions.tolist()):
        for pair in range(8):
            angle = position / 500.0 ** (2 * pair / 16)
            assert cos[row, pair] == pytest.approx(math.cos(angle), abs=1e-5)
            assert sin[row, pair] == pytest.approx(math.sin(angle), abs=1e-5)


def test_tables_in_half_precision_are_rounded_once() -> None:
    rope = model_config(rope_config(rope_type="default").to_dict()).rope
    positions = torch.arange(CONTEXT)
    exact, _ = RotaryEmbedding(rope, CONTEXT, build()).forward(positions)
    half, _ = RotaryEmbedding(rope, CONTEXT, build(torch.bfloat16)).forward(positions)
    assert torch.equal(half, exact.bfloat16())


@pytest.mark.usefixtures("cgroup")
def test_tables_that_exceed_the_memory_are_refused() -> None:
    rope = model_config(rope_config(rope_type="default").to_dict()).rope
    with pytest.raises(OutOfMemoryError, match="1024 positions"):
        RotaryEmbedding(rope, 1024, build())
    with pytest.raises(OutOfMemoryError, match=r"1099511627776 positions .* --max-seq-len-override"):
        RotaryEmbedding(rope, 2**40, build())


@pytest.mark.usefixtures("cgroup")
def test_the_tables_of_all_ranks_must_fit_in_the_memory() -> None:
    rope = model_config(rope_config(rope_type="default").to_dict()).rope
    first = build()
    RotaryEmbedding(rope, 200, first)
    first.communicator.size = 2
    with pytest.raises(OutOfMemoryError, match="200 positions"):
        RotaryEmbedding(rope, 200, first)


def test_dynamic_ntk_equals_transformers_in_the_original_context() -> None:
    config = rope_config(rope_type="dynamic", factor=4.0)
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=CONTEXT)
    mine = model_config(config.to_dict())
    cos, _ = RotaryEmbedding(mine.rope, mine.max_position, build()).forward(torch.arange(CONTEXT))
    assert len(cos) == mine.max_position == CONTEXT
    assert torch.allclose(cos, torch.outer(torch.arange(CONTEXT), expected).cos(), atol=1e-5)
