"""Each class makes one mistake, which the kits for models and for checkpoints must notice."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import pytest
import torch
from kit_runner import failures, iter_failures
from safetensors.torch import load_file
from transformers import AutoConfig

from minisgl_core.contracts.model import Attend, BuildContext, Model
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.contracts.weights import LazyTensor, WeightSource
from minisgl_core.layers import RMSNorm, RowParallelLinear, VocabParallelEmbedding
from minisgl_core.testing.model_kit import ModelTests
from minisgl_core.testing.references import random_reference
from minisgl_core.testing.weights_kit import WeightSourceTests
from minisgl_core.weights.safetensors_folder import SafetensorsWeights
from minisgl_models.llama import LlamaForCausalLM
from minisgl_models.mistral import MistralForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": 9,
}
SMALL, TIED = AutoConfig.for_model("mistral", **SIZES), {**SIZES, "tie_word_embeddings": True}


class HalvesPositions(LlamaForCausalLM):
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, *rest: Any) -> torch.Tensor:
        return super().forward(input_ids, positions // 2, *rest)


class CountsFromTheFirstPosition(LlamaForCausalLM):
    """Counts positions from the step's first one, which is correct for one sequence only."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, *rest: Any) -> torch.Tensor:
        return super().forward(input_ids, positions[:1] + torch.arange(len(positions)), *rest)


class TakesInt64Only(LlamaForCausalLM):
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, *rest: Any) -> torch.Tensor:
        return super().forward(input_ids, torch.arange(64).take(positions), *rest)


class SynchronizesByInt(LlamaForCausalLM):
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, *rest: Any) -> torch.Tensor:
        assert int(positions.max()) < self.config.max_position
        return super().forward(input_ids, positions, *rest)


class SynchronizesByBool(LlamaForCausalLM):
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = super().compute_logits(hidden_states)
        return logits if logits.isfinite().all() else logits.nan_to_num()


class SynchronizesByMask(LlamaForCausalLM):
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, *rest: Any) -> torch.Tensor:
        input_ids = input_ids.clone()
        input_ids[input_ids < 0] = 0
        return super().forward(input_ids, positions, *rest)


class SynchronizesByIndex(LlamaForCausalLM):
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, *rest: Any) -> torch.Tensor:
        return super().forward(input_ids[: positions.argmax() + len(positions)], positions, *rest)


class IgnoresEverything(LlamaForCausalLM):
    def ignored_weights(self) -> tuple[str, ...]:
        return ("*",)


class SwapsGateAndUp(LlamaForCausalLM):
    fused_projections: ClassVar = {**LlamaForCausalLM.fused_projections, "gate_up_proj": ("up_proj", "gate_proj")}


class GivesAllLayersIndex0(LlamaForCausalLM):
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        for layer in self.model.layers.values():
            layer.self_attn.attn.layer = replace(layer.self_attn.attn.layer, index=0)


class ForgetsTheWindow(LlamaForCausalLM):
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        for layer in self.model.layers.values():
            layer.self_attn.attn.layer = replace(layer.self_attn.attn.layer, sliding_window=None)


class ChangesADefault(LlamaForCausalLM):
    @classmethod
    def standard_config(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"rms_norm_eps": 1e-5, **raw}


class BuildsEveryLayer(LlamaForCausalLM):
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, replace(build, layers=None))


class NamesItsLayersFrom0(LlamaForCausalLM):
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.model.layers = dict(enumerate(self.model.layers.values()))


class CountsLayersOfTheWholeModel(LlamaForCausalLM):
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        for index, layer in self.model.layers.items():
            layer.self_attn.attn.layer = replace(layer.self_attn.attn.layer, index=index)


class HasAnEmbeddingInEveryStage(LlamaForCausalLM):
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.model.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, build)


class HasNoStageForItsNorm(LlamaForCausalLM):
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        if build.layers is not None and self.stage.has_lm_head:
            self.model.norm = None

    def weights_of_other_stages(self) -> tuple[str, ...]:
        return *super().weights_of_other_stages(), "model.norm.*"


class AddsBeforeTheAllReduce(LlamaForCausalLM):
    """Adds hidden states and residual between stages. This is correct with one rank, as the next norm adds them anyway."""

    def forward(self, *args: Any) -> torch.Tensor:
        if len(args) == 5 and args[4] is not None:
            return super().forward(*args[:4], torch.stack((args[4].sum(0), torch.zeros_like(args[4][0]))))
        return super().forward(*args)


class SendsItsResidualTwice(LlamaForCausalLM):
    def forward(self, *args: Any) -> torch.Tensor:
        out = super().forward(*args)
        return out if self.stage.has_lm_head else out[1:].expand(2, -1, -1).contiguous()


class SendsHiddenStatesAlone(LlamaForCausalLM):
    def forward(self, *args: Any) -> torch.Tensor:
        out = super().forward(*args)
        return out if self.stage.has_lm_head else out.sum(0)


class ForgetsANorm(LlamaForCausalLM):
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(hidden_states / self.model.norm.weight)


class SkipsItsLayers(LlamaForCausalLM):
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, logits_index: torch.Tensor | None = None
    ) -> torch.Tensor:
        hidden = self.model.norm.forward(self.model.embed_tokens.forward(input_ids))
        return hidden if logits_index is None else hidden.index_select(0, logits_index)


class DoesNotGatherLogits(LlamaForCausalLM):
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.vocab_shard = None


class GathersLogitsTwice(LlamaForCausalLM):
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.gather_logits(super().compute_logits(hidden_states))


class RefusesItsConfig(LlamaForCausalLM):
    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        return ["it is Tuesday"]


class ForgetsAnAllReduce(LlamaForCausalLM):
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.model.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build)


class ReducesTwice(LlamaForCausalLM):
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, build)
        self.model.layers[config.num_layers - 1].mlp.down_proj = down_proj


class AllReducesInOneLayer(ForgetsAnAllReduce):
    """All-reduces in one layer, although fused norms may leave rows of the residual on other ranks."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, build)
        self.model.layers[config.num_layers - 1].mlp.down_proj = down_proj


class ReturnsHiddenStatesInFloat32(LlamaForCausalLM):
    def forward(self, *args: Any) -> torch.Tensor:
        return super().forward(*args).float()

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(hidden_states.to(self.model.norm.weight.dtype))


class ScalesLogitsInFloat32(LlamaForCausalLM):
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(hidden_states).float() * torch.ones(1)


class TakesTheFirstTokens(LlamaForCausalLM):
    def forward(self, *args: Any) -> torch.Tensor:
        hidden = super().forward(*args[:3])
        return hidden[: len(args[3])] if len(args) == 4 else hidden


class DropsOtherTokens(LlamaForCausalLM):
    def forward(self, *args: Any) -> torch.Tensor:
        if len(args) == 3:
            return super().forward(*args)
        ids, positions, attend, index = args
        return super().forward(ids[index], positions[index], attend)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def kit_for(model: type[Model], config: Any = SMALL) -> ModelTests:
    class Kit(ModelTests):
        provider = model

        def make_reference(self) -> Any:
            return random_reference(config)

    return Kit()


def test_a_correct_model_passes() -> None:
    assert failures(kit_for(MistralForCausalLM)) == {}


def test_lengths_of_prompts_can_be_set() -> None:
    kit = kit_for(MistralForCausalLM)
    type(kit).num_tokens, type(kit).num_greedy_tokens = 17, (3, 5)
    assert failures(kit) == {}


def test_tied_embeddings_hide_no_missing_layers() -> None:
    """A model without layers repeats its input if embeddings are tied. The kit must not accept that output."""
    config = AutoConfig.for_model("mistral", **TIED)
    assert failures(kit_for(MistralForCausalLM, config)) == {}
    assert "at position" in str(failures(kit_for(SkipsItsLayers, config))["test_greedy_tokens_equal_the_reference()"])


@pytest.mark.parametrize(
    ("model", "test"),
    [
        (HalvesPositions, "test_logits_equal_the_reference"),
        (CountsFromTheFirstPosition, "test_batched_sequences_are_independent"),
        (TakesInt64Only, "test_chunked_prefill_and_decode_equal_the_reference"),
        (SynchronizesByInt, "test_forward_reads_no_tensor_on_the_host"),
        (SynchronizesByBool, "test_forward_reads_no_tensor_on_the_host"),
        (SynchronizesByMask, "test_forward_reads_no_tensor_on_the_host"),
        (SynchronizesByIndex, "test_forward_reads_no_tensor_on_the_host"),
        (IgnoresEverything, "test_unknown_tensors_are_refused"),
        (SwapsGateAndUp, "test_logits_equal_the_reference"),
        (GivesAllLayersIndex0, "test_attention_layers_are_in_order"),
        (GivesAllLayersIndex0, "test_chunked_prefill_and_decode_equal_the_reference"),
        (ForgetsTheWindow, "test_logits_equal_the_reference"),
        (ForgetsTheWindow, "test_attention_layers_are_in_order"),
        (ChangesADefault, "test_missing_keys_have_their_defaults"),
        (BuildsEveryLayer, "test_a_pipeline_stage_loads_its_layers"),
        (NamesItsLayersFrom0, "test_a_pipeline_stage_loads_its_layers"),
        (CountsLayersOfTheWholeModel, "test_a_pipeline_stage_loads_its_layers"),
        (HasAnEmbeddingInEveryStage, "test_a_pipeline_stage_loads_its_layers"),
        (HasNoStageForItsNorm, "test_a_pipeline_stage_loads_its_layers"),
        (AddsBeforeTheAllReduce, "test_pipeline_parallel_logits_equal_the_reference"),
        (SendsItsResidualTwice, "test_pipeline_parallel_logits_equal_the_reference"),
        (SendsHiddenStatesAlone, "test_pipeline_parallel_logits_equal_the_reference"),
        (ForgetsANorm, "test_greedy_tokens_equal_the_reference"),
        (RefusesItsConfig, "test_logits_equal_the_reference"),
        (ForgetsAnAllReduce, "test_tensor_parallel_logits_equal_the_reference"),
        (ReducesTwice, "test_tensor_parallel_logits_equal_the_reference"),
        (AllReducesInOneLayer, "test_tensor_parallel_logits_equal_the_reference"),
        (ReturnsHiddenStatesInFloat32, "test_it_runs_in_bfloat16"),
        (ScalesLogitsInFloat32, "test_it_runs_in_bfloat16"),
        (TakesTheFirstTokens, "test_logits_of_selected_tokens"),
        (DropsOtherTokens, "test_logits_of_selected_tokens"),
        (DoesNotGatherLogits, "test_tensor_parallel_logits_equal_the_reference"),
        (GathersLogitsTwice, "test_tensor_parallel_logits_equal_the_reference"),
    ],
)
def test_broken_models_fail_the_kit(model: type[Model], test: str) -> None:
    assert next(iter_failures(kit_for(model), test), None)


class Transformed:
    """Lazy tensor whose reads are modified."""

    def __init__(self, tensor: LazyTensor, change: Any) -> None:
        self._tensor, self._change, self.shape = tensor, change, tensor.shape

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        return self._change(self._tensor, index)


class LosesOne(SafetensorsWeights):
    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, LazyTensor]]:
        yield from list(super().tensors(config))[1:]


class RepeatsOne(SafetensorsWeights):
    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, LazyTensor]]:
        yield from 2 * list(super().tensors(config))[:1]


class ReadsOnlyWhole(SafetensorsWeights):
    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, LazyTensor]]:
        for name, tensor in super().tensors(config):
            yield name, Transformed(tensor, lambda whole, index: whole[()])


class ForgetsColumns(SafetensorsWeights):
    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, LazyTensor]]:
        for name, tensor in super().tensors(config):
            yield name, Transformed(tensor, lambda whole, index: whole[index[:1]])


class CanBeListedOnce(SafetensorsWeights):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._left: Any = None

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, LazyTensor]]:
        self._left = self._left or super().tensors(config)
        yield from self._left


class GivesOnlyPackedWeights(SafetensorsWeights):
    def stored_tensors(self, config: ModelConfig, wanted: Container[str]) -> Iterator[tuple[str, LazyTensor]]:
        yield from ((name, tensor) for name, tensor in super().stored_tensors(config, wanted) if "norm" not in name)


class SupportsEveryPath(SafetensorsWeights):
    @classmethod
    def unsupported(cls, path: Path) -> list[str]:
        return []


class HasNoArchitecture(SafetensorsWeights):
    @property
    def config(self) -> Mapping[str, Any]:
        return {key: value for key, value in super().config.items() if key != "architectures"}


def weights_kit_for(source: type[WeightSource]) -> WeightSourceTests:
    class Kit(WeightSourceTests):
        provider = source

        @contextmanager
        def make_checkpoint(self) -> Iterator[tuple[Path, dict[str, torch.Tensor]]]:
            with TemporaryDirectory() as folder:
                random_reference(SMALL).save_pretrained(folder)
                yield Path(folder), load_file(Path(folder) / "model.safetensors")

    return Kit()


def test_a_correct_source_passes() -> None:
    assert failures(weights_kit_for(SafetensorsWeights)) == {}


@pytest.mark.parametrize(
    ("source", "test"),
    [
        (LosesOne, "test_each_tensor_is_listed_once"),
        (RepeatsOne, "test_each_tensor_is_listed_once"),
        (ReadsOnlyWhole, "test_slices_are_parts_of_the_whole"),
        (ForgetsColumns, "test_slices_are_parts_of_the_whole"),
        (CanBeListedOnce, "test_each_tensor_is_listed_once"),
        (GivesOnlyPackedWeights, "test_weights_are_dequantized_if_no_layer_loads_packed"),
        (SupportsEveryPath, "test_only_paths_of_the_format_are_supported"),
        (HasNoArchitecture, "test_config_can_be_read"),
    ],
)
def test_broken_sources_fail_the_kit(source: type[WeightSource], test: str) -> None:
    assert next(iter_failures(weights_kit_for(source), test), None)
