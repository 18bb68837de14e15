"""How dimensions are split, and the layers' parts of their own."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minisgl_core.config.hf import model_config
from minisgl_core.config.model import ModelConfig
from minisgl_core.contracts.communicator import Communicator, SingleRank
from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.ops import Ops
from minisgl_core.errors import InvalidValueError
from minisgl_core.layers.attention import Attention
from minisgl_core.layers.base import Layer, Shard, SumOverRanks, allowed_tp_sizes, check_tp_size
from minisgl_core.layers.decoder import DecoderLayer, DecoderModel
from minisgl_core.layers.embedding import LMHead, VocabParallelEmbedding
from minisgl_core.layers.linear import ColumnParallelLinear, Linear, QKVParallelLinear, RowParallelLinear, fused_targets
from minisgl_core.layers.norm import RMSNorm
from minisgl_core.testing.rank_threads import ThreadCommunicator, run_ranks
from minisgl_core.testing.references import DenseAttention


def build_for(communicator: Communicator) -> BuildContext:
    device = torch.device("cpu")
    return BuildContext(communicator, Ops(device, torch.float32), device, torch.float32)


class OfRank(SingleRank):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@given(total=st.integers(1, 200), size=st.integers(1, 16))
def test_shards_cover_a_dimension_once(total: int, size: int) -> None:
    shards = [Shard.of(total, build_for(OfRank(rank, size))) for rank in range(size)]
    covered = [i for shard in shards for i in range(total)[shard.index] if shard.num_real]
    assert covered == list(range(total))
    assert len({shard.size for shard in shards}) == 1
    assert shards[0].size * size - total < size
    for shard in shards:
        assert shard.is_padded == (shard.size != len(range(total)[shard.index]))


@given(num_kv_heads=st.integers(1, 12), group=st.integers(1, 8))
def test_every_rank_has_the_kv_heads_of_its_queries(num_kv_heads: int, group: int) -> None:
    num_q_heads, dim = num_kv_heads * group, 2
    allowed = allowed_tp_sizes(num_q_heads, num_kv_heads)
    assert 1 in allowed
    assert num_q_heads in allowed, "one query head a rank always works"
    for size in allowed:
        for rank in range(size):
            layer = QKVParallelLinear(4, dim, num_q_heads, num_kv_heads, build_for(OfRank(rank, size)))
            _, (_, k), (_, v) = layer.weight_targets("q", "k", "v")
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


def tiny_config(**changes: int) -> ModelConfig:
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 24,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8,
    }
    return model_config(raw | changes)


def test_a_size_that_does_not_split_the_heads_is_refused() -> None:
    config = tiny_config()
    for size in (1, 2, 4, 12):
        check_tp_size(config, size)
    for size in (3, 5, 6, 24):
        with pytest.raises(InvalidValueError, match=rf"--tp={size} is not valid: must be one of 1, 2, 4, 12 for this"):
            check_tp_size(config, size)


@pytest.mark.parametrize(("vocab_size", "tp_size"), [(7, 1), (8, 4), (7, 4), (5, 4), (97, 3)])
def test_embedding_and_head_over_ranks(vocab_size: int, tp_size: int) -> None:
    """The vocabulary need not divide; a rank may hold none of it."""
    table = torch.randn(vocab_size, 6, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(vocab_size)

    def run(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        build = build_for(communicator)
        embedding = VocabParallelEmbedding(vocab_size, 6, build)
        for _, target in embedding.weight_targets("e"):
            target.destination.copy_(table[target.index])
        head = LMHead(vocab_size, 6, build, tied=embedding)
        head.prepare()
        rows = embedding(ids)
        return rows, head(rows)

    for rows, logits in run_ranks(tp_size, run):
        assert torch.equal(rows, table)
        assert torch.allclose(logits, table @ table.T, atol=1e-5)


def test_a_row_parallel_bias_counts_once() -> None:
    def run(communicator: Communicator) -> torch.Tensor:
        layer = RowParallelLinear(4, 3, build_for(communicator), bias=True)
        for _, target in layer.weight_targets("o"):
            target.destination.fill_(1)
        layer.prepare()
        return layer(torch.ones(2, 4 // communicator.size))

    for size in (1, 2, 4):
        assert all(torch.equal(out, torch.full((2, 3), 5.0)) for out in run_ranks(size, run))


class Sealed(DecoderLayer):
    def forward(self, *args: Any) -> Any:
        return super().forward(*args)


class OwnAttention(Attention):
    def forward(self, *args: Any) -> torch.Tensor:
        return super().forward(*args).tanh()


class OwnModel(DecoderModel):
    def forward(self, *args: Any) -> torch.Tensor:
        return super().forward(*args)


class OwnNorm(RMSNorm):
    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self(x + residual), x + residual


class PlainMLP(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).tanh()

    def weight_targets(self, name: str) -> Any:
        return self.inner.weight_targets(name)


def changed_model(change: str, config: ModelConfig, build: BuildContext) -> DecoderModel:
    class Changed(OwnModel if change == "the model" else DecoderModel):  # type: ignore[misc]
        def build_layer(self, index: int, build: BuildContext) -> DecoderLayer:
            layer = super().build_layer(index, build)
            is_last = index == config.num_layers - 1
            attention = OwnAttention(config, index, build) if is_last and change == "an attention" else layer.attention
            mlp: Any = PlainMLP(layer.mlp) if is_last and change == "an MLP" else layer.mlp
            changed = (Sealed if is_last and change == "a layer" else DecoderLayer)(attention, mlp, config, build)
            if is_last and change == "a norm":
                changed.input_norm = OwnNorm(config.hidden_size, 1e-6, build)
            return changed

    model = Changed(config, build)
    if change == "the last norm's dtype":
        model.norm.weight = torch.nn.Parameter(torch.zeros(24).double(), requires_grad=False)
    if change == "the last norm":
        model.norm = OwnNorm(config.hidden_size, 1e-6, build)
    return model


def fill(model: DecoderModel) -> None:
    """Each rank takes its part of the same weights."""
    for seed, (_, target) in enumerate(model.weight_targets()):
        whole = torch.randn(target.shape or target.destination.shape, generator=torch.Generator().manual_seed(seed))
        target.destination.copy_(whole[target.index] * 0.3)
    model.finalize()


@pytest.mark.parametrize(
    "change", ["a layer", "an attention", "an MLP", "a norm", "the last norm's dtype", "the last norm", "the model"]
)
def test_no_sum_is_left_to_a_norm_where_one_part_is_of_another_kind(change: str) -> None:
    """Or the norms between would leave the residual up to date in some rows alone."""
    config = tiny_config(num_hidden_layers=2)

    def run(communicator: Communicator) -> torch.Tensor:
        model = changed_model(change, config, build_for(communicator))
        fill(model)
        assert not any(module.sums for module in model.modules() if isinstance(module, RMSNorm))
        return model(torch.arange(4), torch.arange(4), DenseAttention())

    [expected] = run_ranks(1, run)
    for size in (2, 4):
        assert all(torch.allclose(hidden, expected, atol=1e-5) for hidden in run_ranks(size, run))


def test_every_sum_is_left_to_the_norm_that_follows_where_nothing_comes_between() -> None:
    config, group = tiny_config(num_hidden_layers=2), OfRank(0, 2)
    model = changed_model("nothing", config, build_for(group))
    model.finalize()
    first, second = model.layers
    assert first.input_norm.sums is None
    norms = (first.post_attention_norm, second.input_norm, second.post_attention_norm, model.norm)
    assert all(norm.sums is group for norm in norms)


@pytest.mark.parametrize(
    "change", ["nothing", "a layer", "an attention", "an MLP", "a norm", "the last norm", "the model"]
)
def test_the_last_layer_computes_the_rows_that_are_wanted_where_it_is_plain(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, rows = tiny_config(num_hidden_layers=2), torch.tensor([1, 4, 6], dtype=torch.int32)
    step = torch.arange(7), torch.arange(7)
    seen: list[int] = []
    forward = Ops.silu_and_mul

    def noted(ops: Ops, gate_up: torch.Tensor) -> torch.Tensor:
        seen.append(len(gate_up))
        return forward(ops, gate_up)

    monkeypatch.setattr(Ops, "silu_and_mul", noted)

    def run(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        model = changed_model(change, config, build_for(communicator))
        fill(model)
        whole = model(*step, DenseAttention())
        seen.clear()
        return whole[rows], model.forward_rows(*step, DenseAttention(), rows)

    [(wanted, found)] = run_ranks(1, run)
    assert torch.allclose(found, wanted, atol=1e-5)
    assert seen == [7, 7 if change in ("a layer", "an attention", "the model") else 3]
    assert all(torch.allclose(found, wanted, atol=1e-5) for wanted, found in run_ranks(2, run))


def test_a_prepared_matrix_belongs_to_the_kernel() -> None:
    kept = []

    class Packing(Ops):
        def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> object:
            kept.append(weight.clone())
            return lambda x: x @ kept[-1].T

    device = torch.device("cpu")
    build = BuildContext(SingleRank(), Packing(device, torch.float32), device, torch.float32)
    layer = Linear(3, 2, build)
    for _, target in layer.weight_targets("a"):
        target.destination.fill_(2)
    layer.prepare()
    assert list(layer.parameters()) == []
    assert layer.weight is None
    assert torch.equal(layer(torch.ones(1, 3)), torch.full((1, 2), 6.0))
    layer.prepare()
    assert len(kept) == 1


def test_using_a_layer_before_finalize_is_noticed() -> None:
    with pytest.raises(AssertionError, match="finalize"):
        Linear(3, 2, build_for(SingleRank()))(torch.ones(1, 3))


def test_a_layer_is_a_module_all_the_same() -> None:
    class Outer(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Linear(3, 2, build_for(SingleRank()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    outer = Outer()
    assert [name for name, _ in outer.named_parameters()] == ["inner.weight"]
    assert outer.__dict__["inner"] is outer.inner is outer._modules["inner"]
    outer.inner = replaced = Linear(3, 2, build_for(SingleRank()))
    assert outer.inner is replaced
    assert [module for _, module in outer.named_children()] == [replaced]


class Halves:
    """A mixin, which is no layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2  # type: ignore[misc]


class Renames(Layer):
    def weight_targets(self, name: str) -> Any:
        return super().weight_targets(f"renamed.{name}")  # type: ignore[misc]


class HalvedByAMixin(Halves, RowParallelLinear):
    pass


class HalvedByAParent(HalvedByAMixin):
    pass


class HalvedAndSummed(Halves, RowParallelLinear):
    def last_sum(self) -> SumOverRanks | None:
        return self._sum


class Renamed(Renames, RowParallelLinear):
    pass


@pytest.mark.parametrize(
    ("kind", "factor", "has_last_sum"),
    [
        (RowParallelLinear, 1, True),
        (Renamed, 1, True),
        (HalvedByAMixin, 0.5, False),
        (HalvedByAParent, 0.5, False),
        (HalvedAndSummed, 0.5, True),
    ],
)
def test_a_call_is_the_forward_that_a_class_finds(
    kind: type[RowParallelLinear], factor: float, has_last_sum: bool
) -> None:
    """Wherever among its bases; and it leaves no sum to others that a nearer `forward` may change."""

    def run(communicator: Communicator) -> tuple[torch.Tensor, bool]:
        layer = kind(4, 3, build_for(communicator))
        for _, target in layer.weight_targets("o"):
            target.destination.fill_(1)
        layer.prepare()
        return layer(torch.ones(2, 4 // communicator.size)), layer.last_sum() is not None

    for out, found in run_ranks(2, run):
        assert torch.equal(out, torch.full((2, 3), 4.0 * factor))
        assert found == has_last_sum


def test_every_layer_is_prepared_once_after_loading() -> None:
    prepared = []

    class FromOne(RMSNorm):
        """Stores what its factor is above 1."""

        def prepare(self) -> None:
            prepared.append(self)
            self.weight += 1

    class Shifted(DecoderModel):
        def __init__(self, config: ModelConfig, build: BuildContext) -> None:
            super().__init__(config, build)
            self.norm = FromOne(config.hidden_size, 1e-6, build)

    model = Shifted(tiny_config(), build_for(SingleRank()))
    model.norm.weight.zero_()
    model.finalize()
    assert prepared == [model.norm]
    assert torch.equal(model.norm.weight, torch.ones(24))


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_layer_may_be_replaced_in_a_constructor(tp_size: int) -> None:
    class Other(DecoderModel):
        def __init__(self, config: ModelConfig, build: BuildContext) -> None:
            super().__init__(config, build)
            layer = self.build_layer(1, build)
            layer.attention.layer = replace(layer.attention.layer, scale=0.0)
            self.layers[1] = layer

    config = tiny_config(num_hidden_layers=2)

    def run(communicator: Communicator) -> torch.Tensor:
        model = Other(config, build_for(communicator))
        assert [layer.scale for layer in model.attention_layers()] == [2**-0.5, 0.0]
        fill(model)
        return model(torch.arange(4), torch.arange(4), DenseAttention())

    plain = DecoderModel(config, build_for(SingleRank()))
    fill(plain)
    before = plain(torch.arange(4), torch.arange(4), DenseAttention())
    plain.layers[1].attention.layer = replace(plain.layers[1].attention.layer, scale=0.0)
    expected = plain(torch.arange(4), torch.arange(4), DenseAttention())
    assert not torch.allclose(before, expected, atol=1e-3)
    assert all(torch.allclose(hidden, expected, atol=1e-5) for hidden in run_ranks(tp_size, run))


@pytest.mark.parametrize("tp_size", [1, 3])
def test_fused_matrices_are_shared_out_like_single_ones(tp_size: int) -> None:
    """With biases, in an order of the checkpoint's own; on three ranks the rows do not divide."""
    sizes = {"a": 4, "b": 7}
    whole = {
        "m.ba.weight": torch.randn(11, 5, generator=torch.Generator().manual_seed(0)),
        "m.ba.bias": torch.randn(11, generator=torch.Generator().manual_seed(1)),
    }
    for rank in range(tp_size):
        single, fused = (ColumnParallelLinear(5, [4, 7], build_for(OfRank(rank, tp_size)), bias=True) for _ in range(2))
        for name, target in single.weight_targets("m.a", "m.b"):
            _, part, kind = name.split(".")
            rows = whole[f"m.ba.{kind}"].split([sizes["b"], sizes["a"]])[part == "a"]
            target.destination.copy_(rows[target.index])
        others = Linear(5, 2, build_for(SingleRank())).weight_targets("m.c")
        passed = list(fused_targets(chain(others, fused.weight_targets("m.a", "m.b")), "ba", ("b", "a")))
        assert [name for name, _ in passed] == ["m.c.weight", *2 * ["m.ba.weight"], *2 * ["m.ba.bias"]]
        for name, target in passed[1:]:
            assert target.shape == whole[name].shape
            target.destination.copy_(whole[name][target.index])
        for one, other in ((single.weight, fused.weight), (single.bias, fused.bias)):
            assert one is not None
            assert other is not None
            assert torch.equal(one, other)


def test_an_error_on_one_rank_ends_all() -> None:
    def run(communicator: Communicator) -> None:
        assert isinstance(communicator, ThreadCommunicator)
        if communicator.rank == 1:
            raise ValueError("rank 1 is broken")
        communicator.all_reduce(torch.zeros(1))

    with pytest.raises(ValueError, match="rank 1 is broken"):
        run_ranks(3, run)


class Halved(LMHead):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


class HalvesLogits(DecoderModel):
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(hidden) / 2


@pytest.mark.parametrize("change", ["nothing", "the model", "the head", "the head's class"])
def test_ranks_keep_their_logits_apart_where_the_head_only_multiplies(change: str) -> None:
    """And where they do, together they have the whole; the vocabulary does not divide."""
    config = tiny_config(num_hidden_layers=1, vocab_size=11)
    hidden = torch.randn(3, config.hidden_size, generator=torch.Generator().manual_seed(0))

    def run(communicator: Communicator) -> torch.Tensor:
        build = build_for(communicator)
        model = (HalvesLogits if change == "the model" else DecoderModel)(config, build)
        if change == "the head":
            model.lm_head = Halved(config.vocab_size, config.hidden_size, build)
        elif change == "the head's class":
            model.lm_head = Linear(config.hidden_size, config.vocab_size, build)
        fill(model)
        shard, own, whole = model.vocab_shard(), model.compute_own_logits(hidden), model.compute_logits(hidden)
        assert (shard is not None) == (change == "nothing" and communicator.size > 1)
        assert own.shape == ((3, 6) if shard else (3, 11))
        assert torch.equal(own if shard is None else shard.gather(own), whole)
        return whole

    [expected] = run_ranks(1, run)
    assert all(torch.allclose(logits, expected, atol=1e-5) for logits in run_ranks(2, run))
