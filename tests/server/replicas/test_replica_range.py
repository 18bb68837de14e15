"""``--replicas MIN:MAX``."""

from __future__ import annotations

import importlib.util
import pickle
from dataclasses import fields
from typing import Any

import pytest
from click.testing import CliRunner

from minisgl_core.cli.main import main
from minisgl_core.config.options import check_value
from minisgl_core.errors import InvalidValueError, MinisglError
from minisgl_server.options import ServerOptions
from minisgl_server.ray import build_app


def replicas(value: Any) -> Any:
    return check_value("--replicas", value, {each.name: each for each in fields(ServerOptions)}["replicas"])


@pytest.mark.parametrize(("value", "expected"), [("2:8", (2, 8)), ("3:3", (3, 3)), ("3", (3, 3)), (4, (4, 4))])
def test_a_range_equals_its_minimum_and_survives_a_copy(value: Any, expected: tuple[int, int]) -> None:
    options = pickle.loads(pickle.dumps(ServerOptions(replicas=replicas(value))))
    assert options.replica_range == expected
    assert options.replicas == expected[0]


@pytest.mark.parametrize("value", ["8:2", "0:4", "2:65", "2:", ":2", "-1:2", "1:2:3", "two", "65", 1.5])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(InvalidValueError, match="--replicas"):
        replicas(value)


def test_a_range_needs_ray() -> None:
    result = CliRunner().invoke(main, ["launch", "--replicas", "2:4"])
    assert result.exit_code
    assert "try --executor ray" in f"{result.output}{result.exception}"


def test_a_config_file_has_the_range() -> None:
    result = CliRunner().invoke(main, ["launch", "--replicas", "2:4", "--print-config"])
    assert 'replicas = "2:4"' in result.output.replace("  ", "")


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_error_names_the_package() -> None:
    with pytest.raises(MinisglError, match=r"pip install 'minisgl-server\[ray\]'"):
        build_app({})
