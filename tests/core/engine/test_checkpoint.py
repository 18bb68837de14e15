"""Default sampling parameters from a model's generation_config.json."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GenerationConfig

from minisgl_core.engine.checkpoint import _IGNORED_KEYS, default_sampling
from minisgl_core.errors import ModelFormatError


def test_sampling_parameters_become_defaults(caplog: pytest.LogCaptureFixture) -> None:
    config = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_length": 2048}
    assert default_sampling(config) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert default_sampling(config | {"do_sample": False}) == {}
    assert not caplog.records


def test_invalid_defaults_are_named() -> None:
    with pytest.raises(ModelFormatError, match=r"generation_config\.json: .*temperature"):
        default_sampling({"temperature": -1.0})


@pytest.mark.parametrize("extra", [{"no_repeat_ngram_size": 3}, {"suppress_tokens": [5]}, {"stop_strings": ["."]}])
def test_unsupported_generation_settings_are_named(extra: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    assert default_sampling({"temperature": 0.5, **extra}) == {"temperature": 0.5}
    assert [record.getMessage() for record in caplog.records] == [
        f"generation_config.json: the engine does not follow {next(iter(extra))}"
    ]


def test_default_values_of_transformers_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    config = GenerationConfig().to_dict()
    assert set(_IGNORED_KEYS) <= set(config)
    default_sampling({**config, "temperature": 1.0, "top_k": 50})
    assert not caplog.records
