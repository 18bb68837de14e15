"""``--tp`` is checked against the heads that the model provider derives from a checkpoint's config."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Gemma4TextConfig

from minisgl_core.config.options import EngineConfig
from minisgl_core.errors import InvalidValueError
from minisgl_core.plugins.registry import Registry
from minisgl_server.launch.tp_check import check_tp


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoint with 6 query heads, and 2 or 3 KV heads, which the provider repeats to 6."""
    Gemma4TextConfig(
        architectures=["Gemma4ForCausalLM"],
        vocab_size=100,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        num_global_key_value_heads=3,
        attention_k_eq_v=True,
        layer_types=["sliding_attention", "full_attention"],
        head_dim=8,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=100,
        num_kv_shared_layers=0,
        max_position_embeddings=64,
    ).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("tp", [1, 2, 3, 6])
def test_allowed_numbers_of_ranks_pass(folder: Path, tp: int) -> None:
    check_tp(options(folder, tp), folder, Registry.from_environment())


@pytest.mark.parametrize("tp", [4, 12])
def test_other_numbers_of_ranks_are_refused(folder: Path, tp: int) -> None:
    with pytest.raises(InvalidValueError, match=f"--tp={tp} .*one of 1, 2, 3, 6 for this model"):
        check_tp(options(folder, tp), folder, Registry.from_environment())


def options(folder: Path, tp: int) -> EngineConfig:
    return EngineConfig().with_flat(model=str(folder), tp=tp, dummy_weight=True)
