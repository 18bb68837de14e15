"""Steps with piecewise CUDA graphs give the tokens of eager steps, whatever the buffers held before."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from transformers import Qwen3MoeConfig

from minisgl_core.contracts.attention import AttentionBackend, AttentionBatch, AttentionCapabilities, AttentionLayer
from minisgl_core.contracts.model import Attend
from minisgl_core.contracts.ops import LinearOps, Ops, RotaryOps
from minisgl_core.engine import piecewise_graphs
from minisgl_core.engine.build import capture_graphs
from minisgl_core.engine.model_runner import ModelRunner
from minisgl_core.engine.piecewise_graphs import PiecewiseGraphs, piecewise_sizes
from minisgl_core.errors import InvalidValueError, MinisglError
from minisgl_core.kv.pool import KVPool
from minisgl_core.platforms.cpu import CpuPlatform
from minisgl_core.protocol.messages import prompt_entries
from minisgl_core.runtime.engine_loop import EngineLoop
from minisgl_core.sampling_params import SamplingParams
from minisgl_core.testing.attention_rig import dense_attention

OPTIONS = {"page_size": 2, "num_pages": 151, "num_rows": 6}
SIZES = [4, 8, 24]
"""Capture sizes: one below the maximum number of requests per step, the others above."""
OF_TINY = torch.device("cpu"), torch.float32


class FusesStore(RotaryOps):
    fuses_store = True


class Tunes(LinearOps):
    is_tuning = False

    @contextmanager
    def tuning(self) -> Iterator[None]:
        self.is_tuning = True
        yield
        self.is_tuning = False


class FusedKvStore(AttentionBackend):
    """Plain attention with `fused_kv_store`: the RoPE kernel stores K and V."""

    capabilities = AttentionCapabilities(fused_kv_store=True)

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        return batch

    def kv_slots(self, plan: AttentionBatch) -> torch.Tensor:
        return plan.slots

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, plan: AttentionBatch
    ) -> torch.Tensor:
        raise AssertionError("K and V were to be stored with RoPE")

    def attend_stored(self, q: torch.Tensor, layer: AttentionLayer, plan: AttentionBatch, out: torch.Tensor) -> None:
        size = self.spec.page_size
        k, v = (each.flatten(0, 1) for each in (self.pool.k(layer.index), self.pool.v(layer.index)))
        ends = np.cumsum(plan.q_lens_host)
        for row, start, end, length in zip(plan.rows, ends - plan.q_lens_host, ends, plan.seq_lens_host, strict=True):
            places = torch.arange(length)
            slots = self.page_table[row, places // size] * size + places % size
            out[start:end] = dense_attention(q[start:end], k[slots], v[slots], layer)


@pytest.fixture(params=["storing", "stored apart"])
def model_runner(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    model_runner = tiny.new_loop(**OPTIONS).model_runner
    model_runner.free_graphs()  # decode graphs would run decode steps, and with the attention that they have captured
    was = model_runner.platform, model_runner.attention, model_runner._ops
    model_runner.platform = CpuPlatform()
    if request.param == "stored apart":
        pool = KVPool(replace(model_runner.attention.pool.spec, layout="NHD"))
        model_runner.attention, model_runner._ops = (
            FusedKvStore(model_runner.attention.spec, pool, model_runner._table.data),
            Ops.of(*OF_TINY, FusesStore),
        )
    model_runner.capture_piecewise_graphs(SIZES, progress=False)
    yield model_runner
    model_runner.free_graphs()
    model_runner.platform, model_runner.attention, model_runner._ops = was


def generate(loop: EngineLoop, seed: int) -> None:
    """Generate from random prompts in chunks beside decodes, and compare every token with transformers."""
    draw = random.Random(seed)
    prompts = {str(i): tuple(draw.randrange(3, 60) for _ in range(draw.randrange(1, 30))) for i in range(12)}
    for name, prompt in prompts.items():
        sampling = SamplingParams(temperature=0.0, max_tokens=draw.randrange(1, 12), ignore_eos=True)
        tiny.submit(loop, name, prompt, sampling)
    for name, found in tiny.run(loop).items():
        assert tuple(found.tokens) == tiny.greedy(prompts[name], len(found.tokens)), name


@pytest.mark.parametrize("cache", ["radix", "naive"])
@pytest.mark.parametrize("max_prefill_length", [3, 7, 16, 40])
def test_tokens_equal_transformers(
    model_runner: ModelRunner, cache: str, max_prefill_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    run = PiecewiseGraphs.run
    monkeypatch.setattr(
        PiecewiseGraphs, "run", lambda self, inputs, *rest: (sizes.append(len(inputs.input_ids)), run(self, inputs))[1]
    )
    loop = tiny.new_loop(cache=cache, max_prefill_length=max_prefill_length, **OPTIONS)
    assert loop.model_runner is model_runner
    for seed in range(3):
        generate(loop, seed)
    assert {size > SIZES[0] for size in sizes} == {True, False}  # several graph sizes ran
    assert max(sizes) <= SIZES[-1]


@pytest.mark.parametrize("num_ahead", [1, 2])
def test_outputs_are_delivered_between_the_launches_of_layers(
    num_ahead: int, model_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has two layers. Before the attention of the second one, outputs may be delivered."""
    monkeypatch.setattr(piecewise_graphs, "_NUM_LAYERS_AHEAD", num_ahead)
    loop = tiny.new_loop(max_prefill_length=7, disable_overlap=False, **OPTIONS)
    num_delivered = tiny.deliver_early(loop)
    for seed in range(3):
        generate(loop, seed)
    assert (sum(num_delivered) > 20) == (num_ahead == 1)
    tiny.assert_nothing_in_use(loop)


def test_progress_is_recorded_before_the_last_quarter_of_the_layers(
    model_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has two layers, so the event is before the second one."""
    num_attended, recorded = 0, dict[Any, int]()
    method = "attend_stored" if model_runner.attention.capabilities.fused_kv_store else "forward"
    attend, record_event = getattr(model_runner.attention, method), model_runner.platform.record_event

    def count(*args: Any) -> Any:
        nonlocal num_attended
        num_attended += 1
        return attend(*args)

    def record() -> Any:
        recorded[event := record_event()] = num_attended
        return event

    loop = tiny.new_loop(disable_overlap=False, **OPTIONS)
    tiny.submit(loop, "a", tuple(range(3, 20)), SamplingParams(temperature=0.0, max_tokens=2))
    monkeypatch.setattr(model_runner.attention, method, count)
    monkeypatch.setattr(model_runner.platform, "record_event", record)
    loop.step()
    progress = loop._in_flight[0].progress
    assert recorded[progress] == 1


def test_a_layer_may_keep_two_attention_outputs(model_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Differential attention subtracts two outputs of one layer."""
    forward = model_runner.model.forward

    def attend_twice(ids: torch.Tensor, positions: torch.Tensor, attend: Attend, index: None) -> torch.Tensor:
        def both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
            first, other = attend(q.clone(), k.clone(), v, *rest), attend(torch.zeros_like(q), k.clone(), v, *rest)
            return first + 0 * other

        return forward(ids, positions, both)

    monkeypatch.setattr(model_runner.model, "forward", attend_twice)
    monkeypatch.setattr(model_runner, "_uses_logits_index", False)
    model_runner.capture_piecewise_graphs(SIZES, progress=False)
    generate(tiny.new_loop(max_prefill_length=7, **OPTIONS), seed=5)


def test_prompt_logprobs_with_piecewise_graphs(model_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Piecewise CUDA graphs run if they compute logits of all tokens; other steps run eagerly."""
    sizes: set[int] = set()
    run = PiecewiseGraphs.run
    monkeypatch.setattr(
        PiecewiseGraphs, "run", lambda self, inputs, *rest: (sizes.add(len(inputs.input_ids)), run(self, inputs))[1]
    )
    loop = tiny.new_loop(max_prefill_length=16, cache="naive", **OPTIONS)
    prompts = {str(length): tuple(range(3, 3 + length)) for length in (2, 4, 9, 16)}
    for name, prompt in prompts.items():
        greedy = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
        found: dict[str, tiny.Collected] = {}
        tiny.submit(loop, name, prompt, greedy)
        tiny.run(loop, found)
        with torch.inference_mode():
            logprobs = tiny.reference_model()(torch.tensor([prompt])).logits[0].log_softmax(-1)
        wanted = logprobs[:-1].gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
        entries = [entry for each in found[name].outputs for entry in prompt_entries(each.prompt_logprobs or ())[1:]]
        assert [entry.token.logprob for entry in entries] == pytest.approx(wanted, abs=1e-4)
    assert sizes == {2, 4}


def test_padding_contains_no_nans(model_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers may hold NaNs before a step, for which a router would select expert ids out of range."""
    run, filled = PiecewiseGraphs.run, set()

    def run_after_nans(self: PiecewiseGraphs, inputs: Any, *rest: Any) -> Any:
        for captured in self._captured.values():
            for call in captured.calls:
                call.out.fill_(torch.nan)
        result, count = run(self, inputs), len(inputs.input_ids)
        size = min(size for size in SIZES if size >= count)
        assert self._captured[size].hidden.isfinite().all()
        filled.add(count < size)
        return result

    monkeypatch.setattr(PiecewiseGraphs, "run", run_after_nans)
    generate(tiny.new_loop(max_prefill_length=16, **OPTIONS), seed=7)
    assert filled == {True, False}


def test_gemms_are_tuned_in_the_run_before_each_capture(
    model_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops, forward, runs = Ops.of(*OF_TINY, Tunes), model_runner.model.forward, list[tuple[int, bool]]()

    def record(ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        runs.append((len(ids), ops.linear.is_tuning))
        return forward(ids, *rest)

    monkeypatch.setattr(model_runner, "_ops", ops)
    monkeypatch.setattr(model_runner.model, "forward", record)
    model_runner.capture_piecewise_graphs(SIZES, progress=False)
    assert runs == [(size, is_tuning) for size in reversed(SIZES) for is_tuning in (True, False)]


class FailsToCapture(CpuPlatform):
    def capture_piecewise(
        self, run: Callable[[Callable[[], None]], torch.Tensor], pool: Any = None
    ) -> tuple[list[Any], torch.Tensor]:
        raise RuntimeError("operation not permitted")


def test_a_failed_capture_names_a_remedy(model_runner: ModelRunner) -> None:
    model_runner.platform = FailsToCapture()
    with pytest.raises(MinisglError) as caught:
        model_runner.capture_piecewise_graphs(SIZES, progress=False)
    assert str(caught.value) == (
        "piecewise CUDA graphs cannot be captured: RuntimeError: operation not permitted"
        " (--piecewise-cuda-graph-max-tokens 0 captures none)"
    )


def test_a_failed_capture_may_leave_no_graphs(model_runner: ModelRunner, caplog: pytest.LogCaptureFixture) -> None:
    assert capture_graphs(model_runner, [], [8], progress=False, may_fail=True)
    model_runner.platform = FailsToCapture()
    with pytest.raises(MinisglError, match="operation not permitted"):
        capture_graphs(model_runner, [], SIZES, progress=False, may_fail=False)
    assert not capture_graphs(model_runner, [], SIZES, progress=False, may_fail=True)
    assert "steps run without CUDA graphs, which takes longer: piecewise CUDA graphs cannot be captured" in caplog.text
    assert model_runner._piecewise is None


@pytest.mark.parametrize("most", [1, 15, 16, 17, 100, 512, 8448])
def test_capture_sizes(most: int) -> None:
    sizes = piecewise_sizes(most)
    assert sizes == sorted(set(sizes))
    assert most <= sizes[-1] < most + 16
    assert all(size % 16 == 0 for size in sizes)
    below = [0, *sizes]
    assert all(size - before <= max(16, before / 8) for before, size in zip(below, sizes, strict=False))
    assert len(sizes) <= 64


def test_platforms_without_graphs_refuse_piecewise_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlatform, "supports_graphs", False)
    with pytest.raises(InvalidValueError, match="--piecewise-cuda-graph-max-tokens=64 is not valid: must be 0 here"):
        tiny.built(piecewise_cuda_graph_max_tokens=64)


def test_moe_models_on_a_cpu_are_not_captured(tmp_path: Path) -> None:
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32, "num_experts": 8}
    config = Qwen3MoeConfig(**small, num_attention_heads=2, num_key_value_heads=1, head_dim=8, moe_intermediate_size=8)
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(tmp_path)
    folder = {"model": str(tmp_path), "dummy_weight": True, "max_seq_len_override": 64}
    for flag in ("cuda_graph_max_bs", "piecewise_cuda_graph_max_tokens"):
        with pytest.raises(InvalidValueError, match="on a CPU, experts cannot be captured"):
            tiny.built(**folder, **{flag: 16})
