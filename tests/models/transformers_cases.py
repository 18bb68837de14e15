"""Tiny models of architectures that run with ``--model-impl transformers``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING, AutoConfig

from minisgl_core import LLM

SMALL: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def skip_if_unsupported(model_type: str, *, needs_plan: bool = False) -> None:
    """Skip a model type that the installed transformers does not have, cannot trace, or has no tensor-parallel plan for."""
    is_traceable = model_type != "aria_text" or Version(transformers.__version__) > Version("5.17")
    if model_type not in CONFIG_MAPPING or not is_traceable:
        pytest.skip("newer than the installed transformers")
    if needs_plan and CONFIG_MAPPING[model_type].base_model_tp_plan is None:
        pytest.skip("the installed transformers has no tensor-parallel plan")


def config_of(model_type: str, **changes: Any) -> Any:
    return AutoConfig.for_model(model_type, **{**SMALL, "pad_token_id": 0, **changes})


def saved(reference: Any, folder: Path) -> str:
    reference.save_pretrained(folder)
    return str(folder)


def new_llm(model: str, **options: Any) -> LLM:
    return LLM(model, **({"dtype": "float32", "platform": "cpu", "ops": "torch", "num_pages": 200} | options))
