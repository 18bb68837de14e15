from __future__ import annotations

import os
from pathlib import Path

import pytest

from minisgl_core.config.options import EngineConfig, check_value, engine_options
from minisgl_core.errors import InvalidValueError


def test_from_flat_and_flat_are_inverse():
    config = EngineConfig.from_flat(page_size=16, attn="fa,fi", tp=2, disable_overlap=True)
    assert config.cache.page_size == 16
    assert config.backends.attn == "fa,fi"
    assert EngineConfig.from_flat(**config.flat()) == config
    assert list(config.flat()) == list(engine_options())


def test_with_flat_leaves_the_rest_alone():
    config = EngineConfig.from_flat(page_size=16)
    assert config.with_flat(tp=2) == EngineConfig.from_flat(page_size=16, tp=2)
    assert config.parallel.tp == 1


def test_an_unknown_option_names_a_close_one():
    with pytest.raises(InvalidValueError, match=r"page_sise=1 .*Did you mean 'page_size'\?"):
        EngineConfig.from_flat(page_sise=1)
    with pytest.raises(InvalidValueError, match=r"tensor_parallel_size=2 .*Did you mean 'tp'\?"):
        EngineConfig.from_flat(tensor_parallel_size=2)
    with pytest.raises(InvalidValueError, match=r"seed=2 .*Each request has a seed of its own"):
        EngineConfig.from_flat(seed=2)


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("page_size", "16", 16),
        ("page_size", "auto", "auto"),
        ("num_pages", None, None),
        ("memory_ratio", "0.5", 0.5),
        ("memory_ratio", 1, 1.0),
        ("dummy_weight", "yes", True),
        ("disable_overlap", "auto", "auto"),
        ("model", "1234", "1234"),
        ("model", Path("a") / "b", os.path.join("a", "b")),
    ],
)
def test_check_value_converts(name, given, value):
    checked = check_value(name, given, engine_options()[name])
    assert checked == value
    assert type(checked) is type(value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("page_size", 0),
        ("page_size", "big"),
        ("page_size", 1.5),
        ("page_size", True),
        ("page_size", None),
        ("num_pages", 1),
        ("memory_ratio", float("nan")),
        ("memory_ratio", 1.01),
        pytest.param("max_step_ms", 10**400, id="max_step_ms-too-large-for-a-float"),
        ("dummy_weight", "perhaps"),
        ("dummy_weight", "auto"),
        ("dummy_weight", 1),
        ("dtype", "int8"),
        ("model", 3),
        ("tp", [1]),
    ],
)
def test_check_value_refuses(name, value):
    with pytest.raises(InvalidValueError, match=f"^{name}="):
        check_value(name, value, engine_options()[name])
