"""Sharding of dimensions, and the shards of the layers."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minisgl_core.config.hf import model_config
from minisgl_core.contracts.communicator import AddNorm, Communicator, SingleRank
from minisgl_core.contracts.layer import Layer, Targets, prepare_all
from minisgl_core.contracts.layer_methods import LinearMethod, LinearSpec
from minisgl_core.contracts.model import BuildContext, Model
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.contracts.ops import LinearOp, LinearOps, Ops, TorchOps
from minisgl_core.contracts.ops.norm import silu_and_mul
from minisgl_core.contracts.quantization import Quantization, QuantizationSpec
from minisgl_core.contracts.shard import Shard, allowed_tp_sizes, check_tp_size
from minisgl_core.errors import InvalidValueError
from minisgl_core.layers import (
    Attention,
    LMHead,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from minisgl_core.testing.rank_threads import ThreadCommunicator, run_ranks
from minisgl_core.testing.references import DenseAttention, NaiveMoe
from minisgl_models.gemma3 import Gemma3ForCausalLM
from minisgl_models.llama import LlamaForCausalLM
from minisgl_models.qwen3 import Qwen3ForCausalLM
from minisgl_models.qwen3_moe import Qwen3MoeForCausalLM


def build_for(communicator: Communicator) -> BuildContext:
    device = torch.device("cpu")
    return BuildContext(communicator, Ops.of(device, torch.float32), device, torch.float32)


QKV = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
GATE_UP = {"gate_up_proj": ("gate_proj", "up_proj")}


def fill_with_ones(layer: Layer) -> None:
    for _, target in layer.weight_targets("layer", {}):
        target.destination.fill_(1)
    layer.prepare()


class FakeRank(SingleRank):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@given(total=st.integers(1, 200), size=st.integers(1, 16))
def test_shards_partition_a_dimension(total: int, size: int) -> None:
    shards = [Shard.of(total, rank, size) for rank in range(size)]
    covered = [i for shard in shards for i in range(total)[shard.index] if shard.unpadded_size]
    assert covered == list(range(total))
    assert len({shard.size for shard in shards}) == 1
    assert shards[0].size * size - total < size
    for shard in shards:
        assert shard.is_padded == (shard.size != len(range(total)[shard.index]))


@given(num_kv_heads=st.integers(1, 12), group=st.integers(1, 8))
def test_ranks_have_the_kv_heads_of_their_query_heads(num_kv_heads: int, group: int) -> None:
    num_q_heads, dim = num_kv_heads * group, 2
    allowed = allowed_tp_sizes(num_q_heads, num_kv_heads)
    assert 1 in allowed
    assert num_q_heads in allowed, "one query head a rank always works"
    for size in allowed:
        for rank in range(size):
            layer = QKVParallelLinear(4, dim, num_q_heads, num_kv_heads, build_for(FakeRank(rank, size)))
            _, (_, k), (_, v) = layer.weight_targets("qkv_proj", QKV)
            kv_rows = range(num_kv_heads * dim)[k.index[0]]
            assert k.index == v.index
            first_q = rank * layer.num_q_heads
            needed = {q // group for q in range(first_q, first_q + layer.num_q_heads)}
            held = [row // dim for row in kv_rows[::dim]]
            assert needed <= set(held)
            assert len(held) == layer.num_kv_heads
            local_group = layer.num_q_heads // layer.num_kv_heads
            for local, q in enumerate(range(first_q, first_q + layer.num_q_heads)):
                assert held[local // local_group] == q // group


RAW = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 24,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8,
}


def tiny_config(**changes: int) -> ModelConfig:
    return model_config(RAW | changes)


def test_tp_sizes_that_do_not_divide_the_heads_are_refused() -> None:
    for size in (1, 2, 4, 12):
        check_tp_size(12, 4, size)
    for size in (3, 5, 6, 24):
        with pytest.raises(InvalidValueError, match=rf"--tp={size} is not valid: must be one of 1, 2, 4, 12 for this"):
            check_tp_size(12, 4, size)
        with pytest.raises(InvalidValueError, match=f"--tp={size}"):
            QKVParallelLinear(4, 2, 12, 4, build_for(FakeRank(0, size)))


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_sinks_are_sharded_by_head(tp_size: int) -> None:
    sinks, held = torch.arange(8.0), []
    for rank in range(tp_size):
        layer = Attention(0, 1.0, None, build_for(FakeRank(rank, tp_size)), num_sinks=8)
        [(name, target)] = layer.weight_targets("model.layers.0.self_attn.attn", {})
        assert name == "model.layers.0.self_attn.sinks"
        target.destination.copy_(sinks[target.index])
        layer.prepare()
        assert layer.layer.sinks is not None
        held.append(layer.layer.sinks)
    assert torch.equal(torch.cat(held), sinks)


def test_pool_layers_of_a_stage_count_from_0() -> None:
    build = replace(build_for(SingleRank()), layers=range(3, 6))
    assert [Attention(index, 1.0, None, build).layer.index for index in build.layers or ()] == [0, 1, 2]


@pytest.mark.parametrize(("vocab_size", "tp_size"), [(7, 1), (8, 4), (7, 4), (5, 4), (97, 3)])
def test_embedding_and_lm_head_are_sharded(vocab_size: int, tp_size: int) -> None:
    """Ranks need not divide the vocabulary; a rank may have no rows."""
    table = torch.randn(vocab_size, 6, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(vocab_size)

    def run(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        build = build_for(communicator)
        embedding = VocabParallelEmbedding(vocab_size, 6, build)
        for _, target in embedding.weight_targets("e", {}):
            target.destination.copy_(table[target.index])
        head = LMHead(vocab_size, 6, build, tied=embedding)
        assert list(head.weight_targets("lm_head", {})) == []
        head.prepare()
        rows = embedding.forward(ids)
        logits = head.forward(rows)
        assert logits.shape == (vocab_size, -(-vocab_size // tp_size)), "this rank's part"
        return rows, logits if head.shard is None else head.shard.gather(logits)

    for rows, logits in run_ranks(tp_size, run):
        assert torch.equal(rows, table)
        assert torch.allclose(logits, table @ table.T, atol=1e-5)


def test_a_row_parallel_bias_is_added_once() -> None:
    def run(communicator: Communicator) -> torch.Tensor:
        layer = RowParallelLinear(4, 3, build_for(communicator), bias=True)
        fill_with_ones(layer)
        return layer.forward(torch.ones(2, 4 // communicator.size))

    for size in (1, 2, 4):
        assert all(torch.equal(out, torch.full((2, 3), 5.0)) for out in run_ranks(size, run))


def fill(model: Model) -> None:
    """Load each rank's shard of the same weights."""
    for seed, (_, target) in enumerate(model.weight_targets("", model.fused_projections)):
        whole = torch.randn(target.shape or target.destination.shape, generator=torch.Generator().manual_seed(seed))
        target.destination.copy_(whole[target.index] * 0.3)
    prepare_all(model)


class CountingRank(SingleRank):
    """Rank 0 of two ranks, which only counts its collectives."""

    def __init__(self) -> None:
        self.rank, self.size, self.calls = 0, 2, Counter[str]()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.calls["all_reduce"] += 1
        return x

    def all_reduce_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, add_norm: AddNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls["all_reduce_add_norm"] += 1
        return add_norm(x, residual, weight, eps)


@pytest.mark.parametrize("model_class", [LlamaForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM])
def test_all_reduces_of_layers_are_fused_into_norms(model_class: type[Model]) -> None:
    """Only the embedding has an all-reduce that is not fused into a norm."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2} if model_class is Qwen3MoeForCausalLM else {}
    group = CountingRank()
    model = model_class(tiny_config(num_hidden_layers=3, **experts), replace(build_for(group), moe_kernel=NaiveMoe))
    fill(model)
    model.forward(torch.arange(4), torch.arange(4), DenseAttention())
    assert group.calls == {"all_reduce": 1, "all_reduce_add_norm": 6}


class CountingOps(TorchOps):
    """Counts the ops that a model calls; ops called by other ops do not count."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self.calls = Counter[str]()

    def count_calls(self, name: str, kernel: Any) -> Any:
        def call(*args: Any) -> Any:
            self.calls[name] += 1
            return kernel(*args)

        return call

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        return self.count_calls("linear", super().prepare_linear(weight, bias))

    def prepare_gated(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        plain = TorchOps(self.device, self.dtype)
        return self.count_calls("gated", plain.prepare_gated(weight, bias))

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        activations = ("silu_and_mul", "gelu_tanh_and_mul")
        kernels = ("gather_rows", "rms_norm", "add_rms_norm", *activations, "apply_rope", "qk_norm_rope", "route")
        return self.count_calls(name, getattr(TorchOps(self.device, self.dtype), name)) if name in kernels else found


@pytest.mark.parametrize("model_class", [LlamaForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM])
def test_ops_per_step_of_llama(model_class: type[Model]) -> None:
    """Each layer has four GEMMs and two fused norms, besides attention, which includes RoPE and QK norms."""
    device, has_experts = torch.device("cpu"), model_class is Qwen3MoeForCausalLM
    experts = {"num_experts": 4, "num_experts_per_tok": 2} if has_experts else {}
    ops = Ops.of(device, torch.float32, CountingOps)
    build = replace(build_for(SingleRank()), ops=ops, moe_kernel=NaiveMoe)
    model = model_class(tiny_config(num_hidden_layers=3, **experts), build)
    fill(model)
    hidden = model.forward(torch.arange(1), torch.arange(1), DenseAttention())
    assert model.compute_logits(hidden).shape == (1, 8)
    of_mlp = {"linear": 3 * 3 + 1, "route": 3} if has_experts else {"linear": 3 * 3 + 1, "gated": 3}
    assert isinstance(ops.norm, CountingOps)
    assert ops.norm.calls == {"gather_rows": 3, "rms_norm": 1, "add_rms_norm": 6, **of_mlp}


def test_ops_per_step_of_gemma() -> None:
    """Two of four norms per layer are fused with the residual addition, and GELU with the multiplication."""
    device = torch.device("cpu")
    ops = Ops.of(device, torch.float32, CountingOps)
    raw = RAW | {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 3, "head_dim": 2}
    config = model_config(Gemma3ForCausalLM.standard_config(raw))
    model = Gemma3ForCausalLM(config, replace(build_for(SingleRank()), ops=ops))
    fill(model)
    model.forward(torch.arange(1), torch.arange(1), DenseAttention())
    assert isinstance(ops.norm, CountingOps)
    norms = {"rms_norm": 1 + 2 * 3, "add_rms_norm": 2 * 3}
    assert ops.norm.calls == {"gather_rows": 5, **norms, "linear": 4 * 3, "gelu_tanh_and_mul": 3}


@pytest.mark.parametrize("model_class", [LlamaForCausalLM, Qwen3ForCausalLM])
def test_the_last_mlp_runs_only_on_tokens_with_logits(
    model_class: type[Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    index = torch.tensor([1, 4, 6], dtype=torch.int32)
    step = torch.arange(7), torch.arange(7)
    seen: list[int] = []

    def record_inputs(gate_up: torch.Tensor) -> torch.Tensor:
        seen.append(len(gate_up))
        return silu_and_mul(gate_up)

    monkeypatch.setattr("minisgl_core.contracts.ops.linear.silu_and_mul", record_inputs)
    model = model_class(tiny_config(num_hidden_layers=2), build_for(SingleRank()))
    fill(model)
    whole = model.forward(*step, DenseAttention())
    seen.clear()
    assert torch.allclose(model.forward(*step, DenseAttention(), index), whole[index], atol=1e-5)
    assert seen == [7, 3]


def test_prepare_frees_the_weight_and_runs_only_once() -> None:
    kept = []

    class Packing(LinearOps):
        def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> object:
            kept.append(weight.clone())
            return lambda x: x @ kept[-1].T

    device = torch.device("cpu")
    build = BuildContext(SingleRank(), Ops.of(device, torch.float32, Packing), device, torch.float32)
    layer = ReplicatedLinear(3, 2, build)
    [(_, target)] = layer.weight_targets("layer", {})
    held = weakref.ref(target.destination.untyped_storage())
    del target
    fill_with_ones(layer)
    gc.collect()
    assert held() is None
    with pytest.raises(AssertionError, match="`prepare` was called before"):
        layer.prepare()
    assert torch.equal(layer.forward(torch.ones(1, 3)), torch.full((1, 2), 3.0))


def test_forward_before_loading_weights_raises_an_error() -> None:
    with pytest.raises(AssertionError, match="the weights have not been loaded"):
        ReplicatedLinear(3, 2, build_for(SingleRank())).forward(torch.ones(1, 3))


class Scale(Layer):
    """Layer with an offset of 1: `factor` holds the stored value, and `prepare` adds 1."""

    def __init__(self) -> None:
        self.factor = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
        self.table = torch.zeros(3)
        self._own = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
        self.num_prepared = 0

    def prepare(self) -> None:
        self.factor += 1
        self.num_prepared += 1


class Nested(Layer):
    def __init__(self) -> None:
        self.scale, self.layers, self._shared = Scale(), [Scale(), Scale()], Scale()


def test_parameters_have_the_names_of_their_attributes() -> None:
    """Plain tensors and attributes with a leading underscore are no parameters."""
    nested = Nested()
    names = ["scale.factor", "layers.0.factor", "layers.1.factor"]
    targets = dict(nested.weight_targets("model", {}))
    assert list(targets) == [f"model.{name}" for name in names]
    assert targets["model.layers.1.factor"].destination is nested.layers[1].factor


def test_every_layer_is_prepared_once() -> None:
    nested = Nested()
    prepare_all(nested)
    assert [each.num_prepared for each in (nested.scale, *nested.layers, nested._shared)] == [1, 1, 1, 0]
    assert torch.equal(nested.scale.factor, torch.ones(2))


def test_an_mlp_may_have_separate_projections() -> None:
    """Without the activation, the two halves are the outputs of the two matrices."""
    layer, joined = (
        MergedColumnParallelLinear(3, [2, 2], build_for(SingleRank()), silu_and_mul=fused) for fused in (False, True)
    )
    for each in (layer, joined):
        for part, (_, target) in enumerate(each.weight_targets("gate_up_proj", GATE_UP)):
            target.destination.fill_(part + 1)
        each.prepare()
    gate, up = layer.forward(torch.ones(1, 3)).chunk(2, -1)
    assert (gate.tolist(), up.tolist()) == ([[3, 3]], [[6, 6]])
    assert torch.equal(joined.forward(torch.ones(1, 3)), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("tp_size", [1, 3])
def test_fused_matrices_are_sharded_like_separate_ones(tp_size: int) -> None:
    """The layers have biases, and three ranks do not divide the rows."""
    sizes = {"a": 4, "b": 7}
    whole = {
        "m.ba.weight": torch.randn(11, 5, generator=torch.Generator().manual_seed(0)),
        "m.ba.bias": torch.randn(11, generator=torch.Generator().manual_seed(1)),
    }
    for rank in range(tp_size):
        build = build_for(FakeRank(rank, tp_size))
        single, fused = (MergedColumnParallelLinear(5, [7, 4], build, bias=True) for _ in range(2))
        for name, target in single.weight_targets("m.ba", {"ba": ("b", "a")}):
            _, part, kind = name.split(".")
            rows = whole[f"m.ba.{kind}"].split([sizes["b"], sizes["a"]])[part == "a"]
            assert target.shape == rows.shape
            target.destination.copy_(rows[target.index])
        passed = list(fused.weight_targets("m.ba", {}))
        assert [name for name, _ in passed] == ["m.ba.weight", "m.ba.weight", "m.ba.bias", "m.ba.bias"]
        for name, target in passed:
            assert target.shape == whole[name].shape
            target.destination.copy_(whole[name][target.index])
        for each in (single, fused):
            each.prepare()
        x = torch.eye(5)
        assert torch.equal(single.forward(x), fused.forward(x))
        assert single.forward(x).any()


class KeepsTheStoredOrder(Quantization):
    """Quantized weights whose rows cannot be permuted, as in packed formats."""

    class Method(LinearMethod):
        def __init__(self, spec: LinearSpec, plain: LinearMethod) -> None:
            super().__init__(spec)
            self.plain = plain

        def targets(self) -> Targets:
            return self.plain.targets()

        def prepare(self) -> LinearOp:
            return self.plain.prepare()

    def linear(self, spec: LinearSpec) -> LinearMethod:
        return self.Method(spec, super().linear(spec))


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_interleaved_rope_dimensions_are_permuted_to_halves(tp_size: int, is_packed: bool) -> None:
    """Only the 4 rotated dimensions of 6 are permuted; V is unchanged."""
    rows = torch.arange(24.0).view(4, 6)
    for rank in range(tp_size):
        build = build_for(FakeRank(rank, tp_size))
        if is_packed:
            spec = QuantizationSpec(build.dtype, build.device)
            build = replace(build, quantization=KeepsTheStoredOrder(spec, build.ops))
        layer = QKVParallelLinear(1, 6, 4, 2, build, bias=True, interleaved_dim=4)
        for name, target in layer.weight_targets("qkv_proj", QKV):
            stored = rows[: 4 if "q_proj" in name else 2].reshape(-1)
            target.destination.copy_((stored[:, None] if "weight" in name else 100 * stored)[target.index])
        layer.prepare()
        q, k, v = layer.heads(torch.ones(1, 1))
        halves, q_heads, kv_heads = [0, 2, 1, 3, 4, 5], 4 // tp_size, 2 // tp_size
        assert torch.equal(q[0], 101 * rows[rank * q_heads :][:q_heads, halves])
        assert torch.equal(k[0], 101 * rows[rank * kv_heads :][:kv_heads, halves])
        assert torch.equal(v[0], 101 * rows[rank * kv_heads :][:kv_heads])


def test_an_error_on_one_rank_ends_all_ranks() -> None:
    def run(communicator: Communicator) -> None:
        assert isinstance(communicator, ThreadCommunicator)
        if communicator.rank == 1:
            raise ValueError("rank 1 is broken")
        communicator.all_reduce(torch.zeros(1))

    with pytest.raises(ValueError, match="rank 1 is broken"):
        run_ranks(3, run)
