"""Modules that a checkpoint leaves unquantized, as transformers and compressed-tensors read their lists."""

from __future__ import annotations

import re
from typing import Any

import pytest

from minisgl_core.contracts.checkpoint_quantization import (
    CheckpointQuantization,
    Int4Format,
    block_shape,
    int4_format,
    is_int8,
)
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
    assert stored.has_unquantized([GATE, HEAD, Q]) == bool(left)


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
def test_ignored_modules_of_compressed_tensors(ignore: list[str], left: list[str]) -> None:
    stored = compressed(group(), ignore=ignore)
    assert [name for name in (Q, GATE, HEAD) if stored.weights_of(name) is None] == left


def test_targets_select_the_quantization_group() -> None:
    attention = group(targets=["re:.*self_attn.*"], weights={"num_bits": 8, "strategy": "channel"})
    mlp = group(targets=[GATE], weights={"num_bits": 4})
    stored = compressed(attention, mlp)
    assert stored.weights_of(Q) == attention["weights"]
    assert stored.weights_of(GATE) == mlp["weights"]
    assert stored.weights_of(HEAD) is None
    assert stored.groups == [attention["weights"], mlp["weights"]]


def test_the_config_is_read_from_either_key() -> None:
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
            {"quant_method": "fp8", "modules_to_not_convert": ["re:a{99999999999}"]},
            "modules_to_not_convert has an invalid regular expression",
        ),
        (
            {"quant_method": "fp8", "modules_to_not_convert": ["a("]},
            "modules_to_not_convert has an invalid regular expression",
        ),
        ({"quant_method": "compressed-tensors", "ignore": [3]}, "ignore must be a list of names"),
        ({"quant_method": "compressed-tensors", "config_groups": [3]}, "config_groups must map"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": 3}}},
            "config_groups: weights must be a mapping",
        ),
    ],
)
def test_invalid_quantization_configs_are_refused(config: Any, message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        CheckpointQuantization.of({"quantization_config": config})


def test_block_sizes() -> None:
    assert block_shape({}) is None
    assert block_shape({"weight_block_size": [128, 64]}) == (128, 64)
    assert block_shape({"block_structure": [128, 128], "strategy": "block"}) == (128, 128)
    for wrong in ([128], [0, 128], "128x128", [1.5, 2]):
        with pytest.raises(ModelFormatError, match="must be two integers above 0"):
            block_shape({"weight_block_size": wrong})


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True, "sym": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}


def packed(weights: dict[str, Any], **changes: Any) -> dict[str, Any]:
    one = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": one}} | changes


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (AWQ, Int4Format("awq", 128, True)),
        (AWQ | {"zero_point": False, "version": None}, Int4Format("awq", 128, False)),
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": -1, "zero_point": True},
            Int4Format("awq", None, True),
        ),
        (GPTQ, Int4Format("gptq", 64, True, True, 1)),
        (GPTQ | {"desc_act": False, "checkpoint_format": "gptq_v2"}, Int4Format("gptq", 64, True)),
        (packed(INT4), Int4Format("compressed-tensors", 32, False)),
        (
            packed(INT4 | {"symmetric": False, "actorder": "group"}),
            Int4Format("compressed-tensors", 32, True, True),
        ),
        (
            packed(INT4 | {"strategy": "channel", "group_size": None, "actorder": "weight"}),
            Int4Format("compressed-tensors", None, False),
        ),
        ({"quant_method": "fp8"}, None),
        (packed({"num_bits": 8, "type": "float"}), None),
    ],
)
def test_int4_formats(config: dict[str, Any], expected: Int4Format | None) -> None:
    stored = CheckpointQuantization(config)
    assert [int4_format(stored, each) for each in stored.groups] == [expected]


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (AWQ | {"bits": 3}, "bits=3, but only 4"),
        (AWQ | {"bits": "4"}, "bits='4'"),
        (AWQ | {"group_size": 0}, "group_size=0, which must be a multiple of 32, or -1"),
        (AWQ | {"group_size": 48}, "group_size=48"),
        (AWQ | {"group_size": True}, "group_size=True"),
        (AWQ | {"version": "gemv"}, "version='gemv'"),
        (AWQ | {"zero_point": 1}, "zero_point=1"),
        (GPTQ | {"desc_act": "yes"}, "desc_act='yes'"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format=True"),
        (GPTQ | {"lm_head": True}, "lm_head=True"),
        (GPTQ | {"modules_in_block_to_quantize": [["a"]]}, "modules_in_block_to_quantize is not supported"),
        (GPTQ | {"dynamic": {"+:a": {"bits": 8}}}, "dynamic has rules"),
        (GPTQ | {"dynamic": ["-:a"]}, "dynamic has rules"),
        (packed(INT4 | {"num_bits": 3}), "num_bits=3"),
        (packed(INT4 | {"strategy": "tensor"}), "strategy='tensor'"),
        (packed(INT4 | {"actorder": "columns"}), "actorder='columns'"),
        (packed(INT4 | {"dynamic": True}), "dynamic=True"),
        (packed(INT4, format="int-quantized"), "format='int-quantized'"),
        (
            packed(INT4, config_groups={"g": {"weights": INT4, "input_activations": {"num_bits": 8}}}),
            "input_activations=",
        ),
    ],
)
def test_malformed_and_unsupported_values_are_named(config: dict[str, Any], key: str) -> None:
    def read() -> Int4Format | None:
        stored = CheckpointQuantization(config)
        return int4_format(stored, stored.groups[0])

    with pytest.raises(ModelFormatError, match=re.escape(key)):
        read()


def test_int8_formats() -> None:
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    stored = CheckpointQuantization(packed(weights, format="int-quantized"))
    assert is_int8(stored, weights)
    assert int4_format(stored, weights) is None
    with pytest.raises(ModelFormatError, match="format='pack-quantized', but only 'int-quantized'"):
        is_int8(CheckpointQuantization(packed(weights)), weights)


def test_modules_excluded_by_gptqmodel() -> None:
    stored = CheckpointQuantization(GPTQ | {"dynamic": {r"-:.*\.mlp\.": {}}})
    assert stored.weights_of(GATE) is None
    assert stored.weights_of(Q) is stored.config


EXPONENTIAL = (
    "(a+)+$", r"(?:(?:\w)*\.?)*$", "(a|a)*$", "a?" * 30 + "a" * 30, "(a|a)" * 30 + "$", ".*.*.*.*.*x", "(?=(a+)+$)b",
    "(?x:(a+) # comment\n +)$", "(?>(a+)+)b", "(a)?(?(1)(a+)+|b)$", "((a{9,}){9,}){9,}",
)  # fmt: skip


@pytest.mark.parametrize("expression", EXPONENTIAL)
@pytest.mark.parametrize("key", ["ignore", "targets", "dynamic", "modules_to_not_convert"])
def test_slow_regular_expressions_are_refused(expression: str, key: str) -> None:
    configs: dict[str, Any] = {
        "ignore": packed(INT4, ignore=["lm_head", f"re:{expression}"]),
        "targets": packed(INT4, config_groups={"g": {"targets": [f"re:{expression}"], "weights": INT4}}),
        "dynamic": GPTQ | {"dynamic": {f"-:{expression}": {}}},
        "modules_to_not_convert": {"quant_method": "fp8", "modules_to_not_convert": [expression]},
    }
    with pytest.raises(ModelFormatError, match=f"quantization_config.{key} has the regular expression.*list names"):
        CheckpointQuantization(configs[key])


def test_many_regular_expressions_and_groups_are_refused() -> None:
    names = [f"model.layers.{index}.mlp" for index in range(10_000)]
    assert compressed(group(), ignore=names).weights_of(GATE) is None
    with pytest.raises(
        ModelFormatError, match=r"ignore has regular expressions of 238,890 characters, and at most 65,536"
    ):
        compressed(group(), ignore=[f"re:{each}" for each in names])
    with pytest.raises(ModelFormatError, match="config_groups has 17 groups, and at most 16 are supported"):
        compressed(*[group()] * 17)


@pytest.mark.parametrize(
    "expression",
    [
        "re:.*self_attn.(q|k|v|o)_proj$", r"re:model\.layers\.\d+\.mlp\..*", "re:.*shared_expert.*", "re:visual.*",
        r"re:.*layers\.([0-9]|1[0-9]|2[0-9])\..*(gate|up|down)_proj.*", r"re:^(?!.*experts).*mlp\.(?:gate|up)_proj",
    ],
)  # fmt: skip
def test_regular_expressions_of_published_checkpoints(expression: str) -> None:
    names = [Q, GATE, "model.layers.3.mlp.shared_expert.up_proj", "visual.blocks.0.attn.qkv"]
    stored = compressed(group(), ignore=[expression])
    found = [name for name in names if stored.weights_of(name) is None]
    assert found == [name for name in names if re.match(expression.removeprefix("re:"), name)]
    assert 0 < len(found) < len(names)
