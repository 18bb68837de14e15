"""Whom a checkpoint's config is shown to, and in which order."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny

from minisgl_core.config.options import EngineConfig
from minisgl_core.engine.build import build_engine, open_checkpoint
from minisgl_core.errors import ModelFormatError, ProviderNotFoundError
from minisgl_core.layers.decoder import DecoderModel
from minisgl_core.plugins.hooks import Hooks
from minisgl_core.plugins.registry import Entry, Registry


class NamesItsKeysAnotherWay(DecoderModel):
    @classmethod
    def standard_config(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**raw, "num_hidden_layers": raw["n_layer"], "intermediate_size": 4 * raw["hidden_size"]}


def with_config(folder: Path, **changes: Any) -> EngineConfig:
    raw = json.loads((tiny.checkpoint() / "config.json").read_text()) | changes
    raw = {key: value for key, value in raw.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "model.safetensors").symlink_to(tiny.checkpoint() / "model.safetensors")
    return EngineConfig.from_flat(model=str(folder), platform="cpu", ops="torch", dtype="float32")


def test_an_architecture_without_a_provider_is_named_whatever_its_config_has(tmp_path: Path) -> None:
    config = with_config(tmp_path, architectures=["GPT2LMHeadModel"], hidden_size=..., num_hidden_layers=...)
    with pytest.raises(ProviderNotFoundError, match=r"no model is called 'GPT2LMHeadModel' \(installed: .*Llama"):
        open_checkpoint(config, tiny.registry())


def test_a_model_translates_the_keys_of_its_config(tmp_path: Path) -> None:
    config = with_config(
        tmp_path, architectures=["Other"], num_hidden_layers=..., intermediate_size=..., n_layer=5, eos_token_id=3
    )
    shipped = Registry.from_environment()
    entries = [*shipped.entries("weights"), Entry("models", "Other", f"{__name__}:NamesItsKeysAnotherWay", "own", "1")]
    checkpoint = open_checkpoint(config, Registry(entries))
    assert (checkpoint.config.num_layers, checkpoint.config.intermediate_size) == (5, 96)
    assert checkpoint.model_class is NamesItsKeysAnotherWay


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "the rotary embedding is of the kind per_layer"),
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
            "the rotary embedding is of the kind longrope",
        ),
    ],
)
def test_what_the_layers_cannot_do_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=message):
        build_engine(with_config(tmp_path, **changes), tiny.registry(), Hooks(), progress=False)
