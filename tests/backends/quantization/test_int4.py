"""4-bit checkpoints and online int4, against float64 on weights that the tests dequantize themselves."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from int4_checkpoints import FORMATS, awq, compressed_int4, gptq, pack_compressed, pack_words

from minisgl_backends.moe.torch_kernel import TorchMoe
from minisgl_backends.quantization.int4 import Int4, Int4Linear
from minisgl_core.contracts.checkpoint_quantization import CheckpointQuantization
from minisgl_core.contracts.layer_methods import ExpertsSpec, LinearPart, LinearSpec
from minisgl_core.contracts.moe import MoeSpec
from minisgl_core.contracts.ops import LinearOp, Ops
from minisgl_core.contracts.quantization import Quantization, QuantizationSpec
from minisgl_core.contracts.shard import Shard
from minisgl_core.errors import ModelFormatError
from minisgl_core.testing.moe_cases import expected_output
from minisgl_core.testing.packed_checkpoint import AnyRank, PackedCheckpoint
from minisgl_core.testing.quantization_kit import PLAIN, QuantizationTests
from minisgl_core.weights.loader import fill_target

CPU = torch.device("cpu")


class TestOnline(QuantizationTests):
    provider = Int4
    loss = 0.15  # a step is 0.3 of a weight's standard deviation


class Stored(QuantizationTests):
    provider = Int4
    loss = 0.01

    def cases(self, num_experts: int = 0) -> list[tuple[Quantization, PackedCheckpoint]]:
        return [each for each in super().cases(num_experts) if each[1] is not PLAIN]


class TestAwq(Stored):
    checkpoints = tuple(each for name, each in FORMATS.items() if name.startswith("awq"))


class TestGptq(Stored):
    checkpoints = tuple(each for name, each in FORMATS.items() if name.startswith("gptq"))


class TestCompressedTensors(Stored):
    checkpoints = tuple(each for name, each in FORMATS.items() if name.startswith("compressed"))


def with_orders(stored: PackedCheckpoint) -> PackedCheckpoint:
    """Return the format with another order of inputs per three matrices; act-order formats have one."""
    if not stored.pack.keywords.get("act_order"):
        return stored
    number = itertools.count()
    return replace(stored, pack=lambda weight: stored.pack(weight, seed=next(number) // 3))


@pytest.mark.parametrize("num_ranks", [1, 2, 9])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_experts_of_several_ranks(name: str, num_ranks: int) -> None:
    """Each of nine ranks has 6 of 48 inputs, within one block of 32 or in two, and the last rank has none."""

    class Kit(Stored):
        checkpoints = (with_orders(FORMATS[name]),)
        moe_kernel = TorchMoe
        dtypes = (torch.float32,)

    kit = Kit()
    [(provider, checkpoint)] = kit.cases(num_experts=3)
    case, modules = kit.case_of_experts(provider, checkpoint, has_bias=True)
    output = torch.zeros(case.x.shape, dtype=torch.float64)
    for rank in range(num_ranks):
        method = kit.experts_method(provider, modules, AnyRank(rank, num_ranks))
        output += method.prepare()(case.x, case.topk_weights, case.topk_ids).double()
    expected = expected_output(case, replace(method.spec.moe, intermediate_size=48))
    kit.check(output, expected, f"{num_ranks} ranks", 1e-4)


def in_order(count: int) -> np.ndarray:
    return np.arange(count) // 64


def shuffled(count: int) -> np.ndarray:
    return np.random.default_rng(count).permutation(in_order(count))


def unequal(*sizes: int) -> np.ndarray:
    return np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))


@pytest.mark.parametrize(
    ("inputs", "inner", "num_ranks"),
    [
        *(((in_order(128), shuffled(128)), (in_order(192), shuffled(192)), ranks) for ranks in (1, 2, 3)),
        ((in_order(128), shuffled(128)), (in_order(200), shuffled(200)), 3),
        ((in_order(128), shuffled(128)), (in_order(504), shuffled(504)), 16),
        ((in_order(128), shuffled(128)), (in_order(200), unequal(50, 60, 60, 30)), 1),
        ((shuffled(128), shuffled(128)), (shuffled(200), unequal(50, 60, 60, 30)), 1),
        ((shuffled(128), unequal(96, 32)), (shuffled(192), shuffled(192)), 1),
        ((unequal(96, 32), shuffled(128)), (shuffled(192), shuffled(192)), 1),
        ((np.sort(unequal(96, 32)), in_order(128)), (in_order(192), in_order(192)), 1),
    ],
)
def test_orders_of_experts(inputs: tuple[np.ndarray, ...], inner: tuple[np.ndarray, ...], num_ranks: int) -> None:
    """The groups of the inputs of two experts. A rank may have whole groups of one expert and parts of groups of the other."""
    sizes = {"gate": (len(inner[0]), 128), "up": (len(inner[0]), 128), "down": (128, len(inner[0]))}
    spec = QuantizationSpec(torch.float32, CPU, 2, FORMATS["compressed-act-order"].quantization())
    modules = {}
    for expert in range(2):
        for name, size in sizes.items():
            groups = inner[expert] if name == "down" else inputs[expert]
            modules[expert, name] = pack_compressed(torch.randn(size), act_order=True, group_of=groups)
    biases = {"gate": torch.randn(2, len(inner[0])), "up": torch.randn(2, len(inner[0])), "down": torch.zeros(2, 128)}
    x, weights, ids = torch.randn(5, 128), torch.rand(5, 1), torch.tensor([[0], [1], [1], [0], [1]])
    found = torch.zeros(5, 128)
    for rank in range(num_ranks):
        shard = Shard.of(len(inner[0]), rank, num_ranks)
        moe = MoeSpec(2, 1, 128, shard.size, torch.float32, CPU, has_bias=True)
        method = Int4(spec, Ops.of(CPU, torch.float32)).experts(ExpertsSpec("m", moe, shard, tuple(sizes)), TorchMoe)
        for target_name, target in method.targets():
            _, expert, name, kind = target_name.split(".")
            tensors = modules[int(expert), name][0] | {"bias": biases[name][int(expert)]}
            fill_target(target_name, tensors[kind], target)
        found += method.prepare()(x, weights, ids)
    for token, expert in enumerate(ids[:, 0].tolist()):
        gate, up, down = (modules[expert, name][1].double() for name in sizes)
        row = x[token].double()
        inside = F.silu(gate @ row + biases["gate"][expert]) * (up @ row + biases["up"][expert])
        torch.testing.assert_close(found[token].double(), weights[token] * (down @ inside), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", ["order", "size"])
def test_orders_that_experts_do_not_support_are_refused(kind: str) -> None:
    """Gate and up have different orders, or all but one of the inputs are in one group."""

    class Kit(Stored):
        checkpoints = (FORMATS["gptq-act-order"],)
        moe_kernel = TorchMoe

    kit = Kit()
    provider, checkpoint = kit.cases(num_experts=3)[0]
    _, modules = kit.case_of_experts(provider, checkpoint)
    for name in ("m.experts.1.gate_proj",) if kind == "order" else ("m.experts.1.gate_proj", "m.experts.1.up_proj"):
        index = modules[name].tensors["g_idx"]
        index.copy_(index.flip(0) if kind == "order" else torch.arange(len(index)) == 0)
    found = "in different orders" if kind == "order" else "all groups of inputs must have the same size"
    with pytest.raises(ModelFormatError, match=found):
        kit.experts_method(provider, modules).prepare()


def operation(
    tensors: dict[str, torch.Tensor],
    stored: PackedCheckpoint,
    parts: list[Shard],
    columns: Shard,
    names: tuple[str, ...] = ("q",),
    gated: bool = False,
) -> LinearOp:
    """Load a layer whose parts are rows of one module, or separate modules."""
    provider = Int4(QuantizationSpec(torch.float32, CPU, 0, stored.quantization()), Ops.of(CPU, torch.float32))
    of_parts = tuple(LinearPart(names[i % len(names)], part) for i, part in enumerate(parts))
    method = provider.linear(LinearSpec("l", of_parts, columns, False, gated, torch.float32, CPU))
    for name, target in method.targets():
        if name in tensors or not target.optional:
            fill_target(name, tensors[name], target)
    return method.prepare()


def named(tensors: dict[str, torch.Tensor], name: str = "q") -> dict[str, torch.Tensor]:
    return {f"{name}.{kind}": tensor for kind, tensor in tensors.items()}


def check(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, rtol=1e-4, atol=1e-5)


@given(data=st.data(), name=st.sampled_from(sorted(FORMATS)))
@settings(max_examples=40)
def test_any_rows_and_columns_of_any_format(data: st.DataObject, name: str) -> None:
    """A rank may begin in the middle of a word and of a group, have no rows or columns, and have padding."""
    rows, columns = (8 * data.draw(st.integers(1, 12)), 8 * data.draw(st.integers(1, 40)))
    shards = []
    for total in (rows, columns):
        start, stop = sorted(data.draw(st.tuples(*[st.integers(0, total)] * 2)))
        shards.append(Shard(start, stop, stop - start + data.draw(st.integers(0, 5)), total))
    tensors, known = FORMATS[name].pack(torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)))
    x = torch.randn(3, shards[1].size)
    found = operation(named(tensors), FORMATS[name], shards[:1], shards[1])(x)
    assert found.shape == (3, shards[0].size)
    assert (found[:, shards[0].unpadded_size :] == 0).all()
    weight = known[shards[0].start : shards[0].stop, shards[1].start : shards[1].stop]
    check(found[:, : shards[0].unpadded_size], x[:, : shards[1].unpadded_size], weight)


@pytest.mark.parametrize("gated", [False, True])
def test_fused_parts_may_have_different_orders(gated: bool) -> None:
    stored, tensors, known = FORMATS["gptq-act-order"], {}, []
    for name in ("gate", "up"):
        packed, dequantized = stored.pack(torch.randn(24, 96))
        order = torch.randperm(96) if name == "up" else torch.arange(96)
        packed["qweight"] = repacked(packed["qweight"], order)
        packed["g_idx"] = packed["g_idx"][order]
        tensors |= named(packed, name)
        known.append(dequantized[:, order])
    x, parts = torch.randn(5, 96), [Shard.whole(24)] * 2
    found = operation(tensors, stored, parts, Shard.whole(96), ("gate", "up"), gated)(x)
    gate, up = (x @ each.T for each in known)
    # Another order of 96 additions changes results by up to 1e-5, which the activation multiplies by up to 30.
    torch.testing.assert_close(found, F.silu(gate) * up if gated else torch.cat((gate, up), -1), rtol=1e-4, atol=1e-3)


def repacked(words: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Reorder the inputs of GPTQ's codes."""
    codes = np.stack([(words.numpy() >> (4 * i)) & 15 for i in range(8)], 1).reshape(len(order), -1)
    return pack_words(codes[order.numpy()], 0)


def test_zero_points_of_0_wrap_around_in_gptq_1() -> None:
    """GPTQModel subtracts 1 from all zero points of a word at once, so that a 0 borrows from the next."""
    stored = FORMATS["gptq"]
    tensors, _ = stored.pack(torch.randn(16, 128))
    zeros = np.array([[0, 15, 1, 0, 0, 8, 7, 3, 14, 0, 0, 0, 2, 1, 5, 0]])
    tensors["qzeros"] = (pack_words(zeros, 1).to(torch.int64) - 0x11111111).to(torch.int32)
    codes = np.stack([(tensors["qweight"].numpy() >> (4 * i)) & 15 for i in range(8)], 1).reshape(128, 16)
    known = torch.from_numpy(codes - zeros).float() * tensors["scales"]
    x = torch.randn(2, 128)
    check(operation(named(tensors), stored, [Shard.whole(16)], Shard.whole(128))(x), x, known.T)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "gptq-act-order",
            {"g_idx": torch.full((64,), 2, dtype=torch.int32)},
            "q.g_idx has a group that is not in 0 to 1",
        ),
        (
            "gptq-act-order",
            {"g_idx": torch.full((64,), -1, dtype=torch.int32)},
            "q.g_idx has a group that is not in 0 to 1",
        ),
        ("gptq-v2", {"g_idx": torch.zeros(64, dtype=torch.int32)}, "q.g_idx has another order than desc_act=false"),
        ("gptq-v2", {"bias": torch.ones(16)}, "l has a bias"),
        ("awq-symmetric", {"scales": torch.ones(3, 16)}, "q.scales has shape"),
        ("awq-symmetric", {"qweight": torch.ones(64, 2)}, "q.qweight is float32, and its layer takes int32"),
    ],
)
def test_malformed_tensors_are_refused(name: str, changes: dict[str, torch.Tensor], message: str) -> None:
    tensors, _ = FORMATS[name].pack(torch.randn(16, 64))
    with pytest.raises(ModelFormatError, match=message):
        operation(named(tensors | changes), FORMATS[name], [Shard.whole(16)], Shard.whole(64))


@pytest.mark.parametrize("name", ["gptq-act-order", "compressed-act-order"])
def test_act_order_requires_group_indices(name: str) -> None:
    tensors, _ = FORMATS[name].pack(torch.randn(16, 64))
    without = {each: tensor for each, tensor in tensors.items() if not each.endswith("g_idx")}
    with pytest.raises(KeyError, match="g_idx"):  # the loader reports it as missing
        operation(named(without), FORMATS[name], [Shard.whole(16)], Shard.whole(64))


@pytest.mark.parametrize("name", ["awq", "gptq-v2", "compressed-tensors"])
@pytest.mark.parametrize("columns", [64, 40])
def test_groups_may_be_larger_than_a_row(name: str, columns: int) -> None:
    stored = {"awq": awq, "gptq-v2": partial(gptq, version=2), "compressed-tensors": compressed_int4}[name](64)
    text = json.dumps(stored.config).replace('"group_size": 64', f'"group_size": {1 << 80}')
    stored = PackedCheckpoint(json.loads(text), stored.pack)
    tensors, known = stored.pack(torch.randn(16, columns))
    x = torch.randn(2, columns)
    check(operation(named(tensors), stored, [Shard.whole(16)], Shard.whole(columns))(x), x, known)


def test_zero_biases_of_autogptq_are_ignored() -> None:
    tensors, known = FORMATS["gptq-v2"].pack(torch.randn(16, 64))
    tensors["bias"] = torch.zeros(16)
    x = torch.randn(2, 64)
    check(operation(named(tensors), FORMATS["gptq-v2"], [Shard.whole(16)], Shard.whole(64))(x), x, known)


def test_biases_missing_in_the_config_are_refused_by_rank_0() -> None:
    """Other ranks of a row-parallel layer never add a bias."""
    tensors, known = FORMATS["gptq-v2"].pack(torch.randn(16, 64))
    stored = named(tensors | {"bias": torch.ones(16)})
    with pytest.raises(ModelFormatError, match="l has a bias"):
        operation(stored, FORMATS["gptq-v2"], [Shard.whole(16)], Shard(0, 32, 32, 64))
    x = torch.randn(2, 32)
    check(operation(stored, FORMATS["gptq-v2"], [Shard.whole(16)], Shard(32, 64, 32, 64))(x), x, known[:, 32:])


def test_fused_parts_with_different_quantization_are_refused() -> None:
    config = {**FORMATS["awq"].config, "modules_to_not_convert": ["k"]}
    spec = QuantizationSpec(torch.float32, CPU, 0, CheckpointQuantization(config))
    parts = tuple(LinearPart(name, Shard.whole(16)) for name in "qk")
    with pytest.raises(ModelFormatError, match="the parts of l in different ways"):
        Int4(spec, Ops.of(CPU, torch.float32)).linear(
            LinearSpec("l", parts, Shard.whole(64), False, False, torch.float32, CPU)
        )


def test_layers_take_the_halves_of_an_sm_in_turn() -> None:
    halves = []
    provider = Int4(QuantizationSpec(torch.float32, CPU), Ops.of(CPU, torch.float32))
    provider._prepare_on_gpu = lambda weight, bias, half: halves.append(half)
    for name in "abc":
        parts = (LinearPart(name, Shard.whole(16)),)
        method = provider.linear(LinearSpec(name, parts, Shard.whole(64), False, False, torch.float32, CPU))
        assert isinstance(method, Int4Linear)
        method.weight.zero_()
        method.prepare()
    assert halves == [0, 1, 0]


def test_unsupported_specs_are_refused() -> None:
    def reasons(config: dict[str, Any] | None, num_experts: int = 0) -> list[str]:
        stored = None if config is None else CheckpointQuantization(config)
        return Int4.unsupported(QuantizationSpec(torch.float32, CPU, num_experts, stored))

    assert reasons(None) == reasons(dict(FORMATS["awq"].config)) == []
    assert "(quant_method 'fp8') are not 4-bit integers" in reasons({"quant_method": "fp8"})[0]
    assert "bits=8" in reasons({**FORMATS["gptq"].config, "bits": 8})[0]
    assert reasons(None, 8) == reasons(dict(FORMATS["awq"].config), 8) == []


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [None, 32])
def test_tensors_packed_by_compressed_tensors(symmetric: bool, group_size: int | None) -> None:
    """Pack and unpack by the package itself, if it is installed."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    strategy = "channel" if group_size is None else "group"
    weights = QuantizationArgs(num_bits=4, type="int", symmetric=symmetric, strategy=strategy, group_size=group_size)
    count = 1 if group_size is None else 96 // group_size
    state = {"weight": torch.randn(24, 96), "weight_scale": torch.rand(24, count) * 0.2 + 0.1}
    state["weight_zero_point"] = torch.randint(-8, 8, (24, count), dtype=torch.int8) * (not symmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    tensors = PackedQuantizationCompressor.compress(state, scheme)
    known = PackedQuantizationCompressor.decompress(dict(tensors), scheme)["weight"]
    stored = compressed_int4(-1 if group_size is None else group_size, symmetric)
    x = torch.randn(2, 96)
    check(operation(named(tensors), stored, [Shard.whole(24)], Shard.whole(96))(x), x, known)
