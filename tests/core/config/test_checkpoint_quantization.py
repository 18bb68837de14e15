"""Which modules a checkpoint leaves unquantized, as transformers and compressed-tensors read their lists."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl_core.contracts.checkpoint_quantization import CheckpointQuantization, block_shape
from minisgl_core.errors import ModelFormatError

Q, GATE, HEAD = "model.layers.1.self_attn.q_proj", "model.layers.11.mlp.gate_proj", "lm_head"


def fp8(*names: str) -> CheckpointQuantization:
    return CheckpointQuantization({"quant_method": "fp8", "modules_to_not_convert": list(names)})


def group(**changes: Any) -> dict[str, Any]:
    return {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8}} | changes


def compressed(*groups: dict[str, Any], ignore: Any = ()) -> CheckpointQuantization:
    config_groups = {f"group_{i}": each for i, each in enumerate(groups)}
    config = {"quant_method": "compressed-tensors", "config_groups": config_groups, "ignore": list(ignore)}
    return CheckpointQuantization(config)


@pytest.mark.parametrize(
    ("names", "left"),
    [
        ([], []),
        (["lm_head"], [HEAD]),
        (["q_proj"], [Q]),
        (["self_attn.q_proj"], [Q]),
        (["model.layers.1"], [Q]),
        (["mlp.gate"], []),
        (["model.layers.11.mlp.gate"], []),
        ([r"model\.layers\.\d+\.mlp.*"], [GATE]),
        ([Q, GATE, HEAD], [Q, GATE, HEAD]),
    ],
)
def test_modules_to_not_convert(names: list[str], left: list[str]) -> None:
    stored = fp8(*names)
    assert [name for name in (Q, GATE, HEAD) if stored.weights_of(name) is None] == left
    assert stored.leaves([GATE, HEAD, Q]) == bool(left)


@pytest.mark.parametrize(
    ("ignore", "left"),
    [
        ([], []),
        (["lm_head"], [HEAD]),
        (["re:.*self_attn.*"], [Q]),
        (["re:model.layers.1"], [Q, GATE]),
        ([GATE], [GATE]),
    ],
)
def test_ignore(ignore: list[str], left: list[str]) -> None:
    stored = compressed(group(), ignore=ignore)
    assert [name for name in (Q, GATE, HEAD) if stored.weights_of(name) is None] == left


def test_groups_have_their_targets() -> None:
    attention = group(targets=["re:.*self_attn.*"], weights={"num_bits": 8, "strategy": "channel"})
    mlp = group(targets=[GATE], weights={"num_bits": 4})
    stored = compressed(attention, mlp)
    assert stored.weights_of(Q) == attention["weights"]
    assert stored.weights_of(GATE) == mlp["weights"]
    assert stored.weights_of(HEAD) is None
    assert stored.groups == [attention["weights"], mlp["weights"]]


def test_where_it_is_read_from() -> None:
    assert CheckpointQuantization.of({}) is None
    assert CheckpointQuantization.of({"quantization_config": None}) is None
    for key in ("quantization_config", "compression_config"):
        stored = CheckpointQuantization.of({key: {"quant_method": "awq", "bits": 4}})
        assert stored is not None
        assert (stored.method, stored.config["bits"]) == ("awq", 4)
        assert stored.groups == [stored.config]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bits": 4}, "has no quant_method"),
        ("fp8", "has no quant_method"),
        (
            {"quant_method": "fp8", "modules_to_not_convert": "lm_head"},
            "modules_to_not_convert must be a list of names",
        ),
        (
            {"quant_method": "fp8", "modules_to_not_convert": ["a("]},
            "modules_to_not_convert has an invalid regular expression",
        ),
        ({"quant_method": "compressed-tensors", "ignore": [3]}, "ignore must be a list of names"),
        ({"quant_method": "compressed-tensors", "config_groups": [3]}, "config_groups must map"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": 3}}},
            "weights of a group must be a mapping",
        ),
    ],
)
def test_what_cannot_be_read(config: Any, message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        CheckpointQuantization.of({"quantization_config": config})


def test_sizes_of_blocks() -> None:
    assert block_shape({}) is None
    assert block_shape({"weight_block_size": [128, 64]}) == (128, 64)
    assert block_shape({"block_structure": [128, 128], "strategy": "block"}) == (128, 128)
    for wrong in ([128], [0, 128], "128x128", [1.5, 2]):
        with pytest.raises(ModelFormatError, match="which must be two integers above 0"):
            block_shape({"weight_block_size": wrong})
