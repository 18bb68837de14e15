"""Each class breaks one thing; the kits for models and for checkpoints must notice every one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from minisgl_core.config.model import ModelConfig
from minisgl_core.contracts.attention import AttentionLayer
from minisgl_core.contracts.model import Attend, BuildContext, Model
from minisgl_core.contracts.weights import LazyTensor, WeightSource, WeightTarget
from minisgl_core.layers.decoder import DecoderModel
from minisgl_core.testing.kit_runner import failures
from minisgl_core.testing.model_kit import ModelTests
from minisgl_core.testing.references import random_reference
from minisgl_core.testing.weights_kit import WeightSourceTests
from minisgl_models.weights.safetensors_folder import SafetensorsWeights

SMALL = AutoConfig.for_model(
    "mistral",
    vocab_size=37,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    sliding_window=9,
)


class Right(DecoderModel):
    pass


class HalvesPositions(DecoderModel):
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        return super().forward(input_ids, positions // 2, attend)


class SwapsGateAndUp(DecoderModel):
    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        swap = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
        for name, target in super().weight_targets():
            part = name.split(".")[-2]
            yield name.replace(part, swap.get(part, part)), target


class EveryLayerIsTheFirst(DecoderModel):
    def build_layer(self, index: int, build: Any) -> Any:
        layer = super().build_layer(index, build)
        layer.attention.layer = AttentionLayer(0, layer.attention.layer.scale, layer.attention.layer.sliding_window)
        return layer


class ForgetsTheWindow(DecoderModel):
    def build_layer(self, index: int, build: Any) -> Any:
        layer = super().build_layer(index, build)
        layer.attention.layer = AttentionLayer(index, layer.attention.layer.scale)
        return layer


class ForgetsANorm(DecoderModel):
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(hidden / self.norm.weight)


class TakesAllLogitsForItsOwn(DecoderModel):
    def compute_own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.compute_logits(hidden)


class RefusesItsConfig(DecoderModel):
    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        return ["it is Tuesday"]


class ForgetsToSum(DecoderModel):
    def build_layer(self, index: int, build: Any) -> Any:
        layer = super().build_layer(index, build)
        layer.mlp.down_proj._sum = None
        return layer


class LeavesOneSumToItsNorm(DecoderModel):
    def finalize(self) -> None:
        super().finalize()
        last_sum = self._layers[-1].mlp.last_sum()
        if last_sum is not None:
            last_sum.is_left, self.norm.sums = False, None


class KeepsAWeightInFloat32(DecoderModel):
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.norm.weight = torch.nn.Parameter(torch.empty(config.hidden_size), requires_grad=False)


class ScalesLogitsInFloat32(DecoderModel):
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(hidden).float() * torch.ones(1)


class TakesTheFirstRows(DecoderModel):
    def forward_rows(self, *args: Any) -> torch.Tensor:
        *step, rows = args
        return self(*step)[: len(rows)]


class DropsOtherTokens(DecoderModel):
    def forward_rows(self, *args: Any) -> torch.Tensor:
        ids, positions, attend, rows = args
        return self(ids[rows], positions[rows], attend)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def kit_for(model: type[Model]) -> ModelTests:
    class Kit(ModelTests):
        model_class = model

        def make_reference(self) -> Any:
            return random_reference(SMALL)

    return Kit()


def test_a_right_model_passes() -> None:
    assert failures(kit_for(Right)) == {}


@pytest.mark.parametrize(
    ("model", "test"),
    [
        (HalvesPositions, "test_logits_equal_the_reference"),
        (SwapsGateAndUp, "test_logits_equal_the_reference"),
        (EveryLayerIsTheFirst, "test_attention_layers_are_in_order"),
        (EveryLayerIsTheFirst, "test_steps_equal_the_whole"),
        (ForgetsTheWindow, "test_logits_equal_the_reference"),
        (ForgetsTheWindow, "test_attention_layers_are_in_order"),
        (ForgetsANorm, "test_greedy_tokens_equal_the_reference"),
        (RefusesItsConfig, "test_logits_equal_the_reference"),
        (ForgetsToSum, "test_ranks_together_equal_one"),
        (LeavesOneSumToItsNorm, "test_ranks_together_equal_one"),
        (KeepsAWeightInFloat32, "test_it_runs_in_bfloat16"),
        (ScalesLogitsInFloat32, "test_it_runs_in_bfloat16"),
        (TakesTheFirstRows, "test_hidden_states_of_some_tokens"),
        (DropsOtherTokens, "test_hidden_states_of_some_tokens"),
        (TakesAllLogitsForItsOwn, "test_ranks_together_equal_one"),
    ],
)
def test_the_model_kit_notices(model: type[Model], test: str) -> None:
    assert any(name.startswith(test) for name in failures(kit_for(model)))


class Transformed:
    """A lazy tensor whose reads are changed."""

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


class TakesEverything(SafetensorsWeights):
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


def test_a_right_source_passes() -> None:
    assert failures(weights_kit_for(SafetensorsWeights)) == {}


@pytest.mark.parametrize(
    ("source", "test"),
    [
        (LosesOne, "test_every_tensor_comes_once"),
        (RepeatsOne, "test_every_tensor_comes_once"),
        (ReadsOnlyWhole, "test_slices_are_parts_of_the_whole"),
        (ForgetsColumns, "test_slices_are_parts_of_the_whole"),
        (CanBeListedOnce, "test_tensors_can_be_listed_again"),
        (TakesEverything, "test_it_knows_its_files_and_no_others"),
        (HasNoArchitecture, "test_config_can_be_read"),
    ],
)
def test_the_weights_kit_notices(source: type[WeightSource], test: str) -> None:
    assert any(name.startswith(test) for name in failures(weights_kit_for(source)))
