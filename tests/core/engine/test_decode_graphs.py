"""Captured decode steps give the tokens of eager steps, for all sampling parameters and after any other steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import tiny
import torch

from minisgl_core.contracts.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionCapabilities,
    AttentionLayer,
    AttentionSpec,
)
from minisgl_core.contracts.communicator import SingleRank
from minisgl_core.contracts.model import Model
from minisgl_core.contracts.ops import Ops, SamplingOps, StepOps, VocabShard
from minisgl_core.engine import decode_graphs as graphs
from minisgl_core.engine.decode_graphs import DecodeGraphs
from minisgl_core.engine.model_runner import ModelRunner
from minisgl_core.engine.step import ForwardOutput
from minisgl_core.kv.pool import KVPool
from minisgl_core.platforms.cpu import CpuPlatform
from minisgl_core.protocol.batch_plan import BatchPlan, TokenMasks
from minisgl_core.sampling_params import SamplingParams

SIZES = [1, 2, 4]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 0.8},
    "log-probabilities": {"temperature": 0.8, "logprobs": 2},
    "filters": {"temperature": 0.9, "top_k": 20, "top_p": 0.9},
    "filters of nothing random": {"temperature": 0.0, "top_k": 20, "top_p": 0.9},
    "penalties": {"temperature": 0.0, "presence_penalty": 0.7, "repetition_penalty": 1.2},
    "biases": {"temperature": 0.8, "logit_bias": {5: 3.0, 7: -100.0}},
}


class AttendsToWholePageTables(AttentionBackend):
    """Attends to the whole page table of each request with a mask, so it needs no other metadata."""

    capabilities = AttentionCapabilities(layouts=("HND", "NHD"), cuda_graphs=True, graph_reads_page_table=True)

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        return []

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        return batch

    def plan_capture(self, batch: AttentionBatch) -> AttentionBatch:
        return batch

    def plan_replay(self, batch: AttentionBatch) -> None:
        pass

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, plan: AttentionBatch
    ) -> torch.Tensor:
        of_k, of_v = (each.flatten(0, 1) for each in (self.pool.k(layer.index), self.pool.v(layer.index)))
        of_k.index_copy_(0, plan.slots, k)
        of_v.index_copy_(0, plan.slots, v)
        rows, lengths = plan.rows, plan.seq_lens
        if plan.num_decodes < len(q):
            counts = torch.from_numpy(plan.q_lens_host).long()
            rows = rows.repeat_interleave(counts)
            ends = plan.seq_lens_host.repeat(plan.q_lens_host)
            places = np.concatenate([np.arange(count - 1, -1, -1) for count in plan.q_lens_host])
            lengths = torch.from_numpy(ends - places)
        size = self.spec.page_size
        slots = (self.page_table[rows][:, :, None] * size + torch.arange(size)).flatten(1)
        group = q.shape[1] // k.shape[1]
        keys, values = (each[slots].repeat_interleave(group, 2) for each in (of_k, of_v))
        scores = torch.einsum("thd,tlhd->thl", q, keys) * layer.scale
        hidden = torch.arange(slots.shape[1]) >= lengths[:, None]
        return torch.einsum("thl,tlhd->thd", scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1), values)


class AttendsToGatheredPageTables(AttendsToWholePageTables):
    """The graph reads page-table rows that are gathered before the replay, as with FlashAttention."""

    capabilities = replace(AttendsToWholePageTables.capabilities, graph_reads_page_table=False)

    def plan_capture(self, batch: AttentionBatch) -> Any:
        gathered = self.__dict__.setdefault("gathered", {})
        gathered[len(batch.rows)] = self.page_table[batch.rows]
        return batch, gathered[len(batch.rows)]

    def plan_replay(self, batch: AttentionBatch) -> None:
        self.gathered[len(batch.rows)].copy_(self.page_table[batch.rows])

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, plan: Any
    ) -> torch.Tensor:
        if isinstance(plan, AttentionBatch):
            return super().forward(q, k, v, layer, plan)
        batch, gathered = plan
        whole, self.page_table = self.page_table, gathered
        try:
            return super().forward(q, k, v, layer, replace(batch, rows=torch.arange(len(gathered))))
        finally:
            self.page_table = whole


@pytest.fixture(scope="module", params=[1, 4])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"page_size": request.param, "num_pages": 240 // request.param + 1}


@pytest.fixture(scope="module", params=[AttendsToWholePageTables, AttendsToGatheredPageTables])
def model_runner(options: dict[str, Any], request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    model_runner = tiny.built(**options).model_runner
    model_runner.free_graphs()
    was = model_runner.platform, model_runner.attention, model_runner._ops
    pool = KVPool(replace(model_runner.attention.pool.spec, layout="NHD"))
    model_runner.platform, model_runner._ops = CpuPlatform(), Ops.of(torch.device("cpu"), torch.float32)
    model_runner.attention = request.param(model_runner.attention.spec, pool, model_runner._table.data)
    yield model_runner
    model_runner.platform, model_runner.attention, model_runner._ops = was


def outputs(
    kinds: Sequence[str], options: dict[str, Any], *, overlap: bool, **more: Any
) -> tuple[dict[str, list[int]], list[float]]:
    """Return the tokens of each request, and all log-probabilities. Prompts are sent twice, so that a cache has most of them."""
    loop = tiny.new_loop(max_prefill_length=16, max_running_requests=4, **options, **more)
    loop.overlap = overlap
    tokens, logprobs = {}, []
    for turn in range(2):
        draw = random.Random(len(kinds))
        for i, kind in enumerate(kinds):
            prompt = tuple(draw.randrange(3, 60) for _ in range(draw.randrange(1, 12)))
            sampling = SamplingParams(**SAMPLINGS[kind], seed=i, max_tokens=draw.randrange(1, 20), ignore_eos=True)
            tiny.submit(loop, f"{turn} {i}", prompt, sampling)
        found = tiny.run(loop)
        entries = [entry for name in sorted(found) for output in found[name].outputs for entry in output.logprobs or ()]
        logprobs += [each.logprob for entry in entries for each in (entry.token, *entry.top)]
        tokens |= {name: each.tokens for name, each in found.items()}
    return tokens, logprobs


@contextmanager
def captured_graphs(model_runner: ModelRunner, sizes: Sequence[int] = SIZES) -> Iterator[None]:
    """Replay graphs of decode steps of these sizes within the context."""
    model_runner.capture_decode_graphs(sizes, progress=False)
    assert model_runner._graphs is not None
    try:
        yield
        assert model_runner._graphs is not None
        assert model_runner._graphs._captured
        assert model_runner._graphs._sizes.tolist() == list(sizes), "a replay computed other logits"
    finally:
        model_runner.free_graphs()


@pytest.mark.parametrize(
    ("cache", "overlap"),
    [
        ("radix", True),
        ("naive", False),
        pytest.param("radix", False, marks=pytest.mark.nightly),
        pytest.param("naive", True, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize(
    "kinds", [*((kind,) * 6 for kind in SAMPLINGS), tuple(SAMPLINGS) * 2], ids=lambda kinds: " ".join(kinds[:2])
)
def test_replayed_decodes_give_the_tokens_of_eager_ones(
    model_runner: ModelRunner, options: dict[str, Any], kinds: tuple[str, ...], cache: str, overlap: bool
) -> None:
    wanted = outputs(kinds, options, cache=cache, overlap=False)
    with captured_graphs(model_runner):
        for _ in range(2):
            tokens, logprobs = outputs(kinds, options, cache=cache, overlap=overlap)
            assert tokens == wanted[0]
            assert logprobs == pytest.approx(wanted[1], abs=1e-4)  # padding may change rounding


def with_masks(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `ModelRunner.execute_model` to mask every second request of a decode step."""

    def execute_model(model_runner: ModelRunner, plan: BatchPlan, *rest: None) -> Any:
        if plan.num_decodes == plan.num_tokens:
            masked = np.arange(0, plan.num_tokens, 2, dtype=np.int32)
            plan = msgspec.structs.replace(plan, sample=msgspec.structs.replace(plan.sample, masked=masked))
        return step(model_runner, plan)

    return execute_model


def apply_masks(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `ModelRunner.sample_tokens` to allow five tokens, drawn by the request's slot and position."""

    def sample_tokens(model_runner: ModelRunner, output: ForwardOutput, masks: TokenMasks | None = None) -> Any:
        plan = output.plan
        bits = np.zeros((len(plan.sample.masked), 64), np.uint8)
        for allowed, place in zip(bits, plan.sample.masked, strict=True):
            allowed[random.Random(f"{plan.rows[place]} {plan.starts[place]}").sample(range(tiny.VOCAB_SIZE), 5)] = 1
        words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        return step(model_runner, output, TokenMasks(words=words.ravel()) if len(bits) else None)

    return sample_tokens


@pytest.mark.parametrize("kinds", [("greedy",) * 6, tuple(SAMPLINGS)], ids=["greedy", "all"])
@pytest.mark.parametrize("overlap", [False, True])
def test_grammar_masks_apply_in_replayed_decodes(
    model_runner: ModelRunner,
    options: dict[str, Any],
    kinds: tuple[str, ...],
    overlap: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ModelRunner, "execute_model", with_masks(ModelRunner.execute_model))
    monkeypatch.setattr(ModelRunner, "sample_tokens", apply_masks(ModelRunner.sample_tokens))
    wanted = outputs(kinds, options, cache="naive", overlap=overlap)
    with captured_graphs(model_runner):
        tokens, logprobs = outputs(kinds, options, cache="naive", overlap=overlap)
    assert tokens == wanted[0]
    assert logprobs == pytest.approx(wanted[1], abs=1e-4)


class FirstOfTwoRanks(SingleRank):
    """Rank 0 of two ranks; its all-gather computes the other rank's logits."""

    def __init__(self, model: Model) -> None:
        self.rank, self.size = 0, 2
        self.whole = model.compute_logits
        self.logits = torch.empty(SIZES[-1], tiny.VOCAB_SIZE)
        self.num_gathered = 0

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.logits[: len(hidden)].copy_(self.whole(hidden))  # also in a replay
        return self.logits[: len(hidden), : -(-tiny.VOCAB_SIZE // 2)].clone()

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        self.num_gathered += 1
        later = self.logits[: len(x), x.shape[1] :]
        return torch.cat((x, later, torch.full((len(x), 3), 99.0)), dim)


@pytest.mark.parametrize("kinds", [("random",) * 6, tuple(SAMPLINGS)], ids=["random", "all"])
def test_logits_of_all_ranks_are_gathered_only_if_needed(
    model_runner: ModelRunner, options: dict[str, Any], kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = outputs(kinds, options, cache="naive", overlap=False)
    group = FirstOfTwoRanks(model_runner.model)
    monkeypatch.setattr(model_runner.model, "vocab_shard", VocabShard(group, tiny.VOCAB_SIZE))
    monkeypatch.setattr(model_runner.model, "compute_logits", group.compute_logits)
    monkeypatch.setattr(model_runner, "_logits", group.whole)  # of prefills
    with captured_graphs(model_runner, SIZES[-1:]):
        outputs(kinds, options, cache="naive", overlap=False)  # captures
        num_before = group.num_gathered
        tokens, logprobs = outputs(kinds, options, cache="naive", overlap=False)
    assert tokens == wanted[0]
    assert logprobs == pytest.approx(wanted[1], abs=1e-4)
    assert (group.num_gathered > num_before) == (set(kinds) != {"random"}), "no logits are gathered without need"


def test_all_graph_sizes_run_with_and_without_new_pages(
    model_runner: ModelRunner, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, has_pages = set(), set()
    run = DecodeGraphs.run

    def record_run(graphs: DecodeGraphs, plan: BatchPlan) -> ForwardOutput:
        sizes.add(plan.num_tokens)
        has_pages.add(len(plan.page_table_writes) > 0)
        return run(graphs, plan)

    monkeypatch.setattr(DecodeGraphs, "run", record_run)
    with captured_graphs(model_runner):
        outputs(("greedy",) * 6, options, cache="radix", overlap=False)
    assert sizes == {1, 2, 3, 4}
    assert has_pages == ({True} if options["page_size"] == 1 else {True, False})


class NumpySampling(SamplingOps):
    def sample(self, logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(logits.numpy().argmax(-1))


class NumpyScatter(StepOps):
    def scatter(self, table: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
        table.numpy()[index.numpy()] = values.numpy()


@pytest.mark.parametrize(("role", "provider"), [("sampling", NumpySampling), ("step", NumpyScatter)])
def test_kernels_that_bypass_torch_are_not_captured(
    model_runner: ModelRunner,
    options: dict[str, Any],
    role: str,
    provider: type[SamplingOps | StepOps],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A replay would omit them, so that requests would get tokens of earlier steps."""
    replaced = {role: provider(torch.device("cpu"), torch.float32)}
    monkeypatch.setattr(model_runner, "_ops", replace(model_runner._ops, **replaced))
    wanted = outputs(("greedy",) * 6, options, overlap=False)
    model_runner.capture_decode_graphs(SIZES, progress=False)
    try:
        assert outputs(("greedy",) * 6, options, overlap=False) == wanted
        assert model_runner._graphs is not None
        assert not model_runner._graphs._captured
    finally:
        model_runner.free_graphs()


def test_page_table_writes_of_cached_pages_precede_the_replay(
    model_runner: ModelRunner, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoding request may have moved to pages of the prefix cache."""
    if not model_runner.attention.capabilities.graph_reads_page_table:
        pytest.skip("all page-table writes precede the replay")
    wanted = outputs(("greedy",) * 6, options, overlap=False)
    decode_new_pages, size = graphs.decode_new_pages, options["page_size"]

    def check_new_pages(plan: BatchPlan, page_size: int) -> np.ndarray | None:
        found = decode_new_pages(plan, page_size)
        assert found is not None
        written = plan.page_table_writes.reshape(3, -1)
        again = np.concatenate((written, [plan.rows[:1], [0], table[plan.rows[:1], 0]]), axis=1, dtype=np.int32)
        if plan.starts[0] >= size:
            assert decode_new_pages(msgspec.structs.replace(plan, page_table_writes=again.ravel()), page_size) is None
        return None

    table = model_runner._table.data.numpy()
    monkeypatch.setattr(graphs, "decode_new_pages", check_new_pages)
    with captured_graphs(model_runner):
        assert outputs(("greedy",) * 6, options, overlap=False) == wanted
