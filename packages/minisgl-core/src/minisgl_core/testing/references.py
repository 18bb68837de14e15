"""Plain implementations that the kits compare with: attention without pages, experts one token at a time, a checkpoint
written by transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from minisgl_core.contracts.attention import AttentionLayer
from minisgl_core.contracts.model import Attend
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.contracts.moe import ExpertWeights, MoeCapabilities, MoeKernel
from minisgl_core.contracts.ops import RotaryOps, Rotation
from minisgl_core.contracts.weights import LazyTensor, WeightSource
from minisgl_core.testing.moe_cases import activated, check_fields, dequantized
from minisgl_core.utils.fp8 import FP8

_KNOWN_FIELDS = {"index", "scale", "sliding_window", "kv_scales", "soft_cap", "sinks"}
"""Of a layer; a field that is added there must change the references too."""


def check_known(layer: AttentionLayer) -> None:
    """Raise AssertionError where a reference would ignore a field of the layer, such as one of a subclass."""
    names = {each.name for each in fields(layer)}
    assert names == _KNOWN_FIELDS, (
        f"the kits' references do not know {sorted(names - _KNOWN_FIELDS)} of attention layers"
    )


class DenseAttention:
    """An `Attend` for one sequence that keeps all keys and values; float32, causal, with windows, soft caps and sinks."""

    def __init__(self) -> None:
        self._past: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] of the sequence's next T tokens, to [T, Hq, D]."""
        check_known(layer)
        if rotation is not None:
            q, k = RotaryOps(q.device, q.dtype).rotate(q, k, rotation)
        if layer.index in self._past:
            past_k, past_v = self._past[layer.index]
            k, v = torch.cat((past_k, k)), torch.cat((past_v, v))
        self._past[layer.index] = (k.clone(), v.clone())
        num_new, num_all, group = len(q), len(k), q.shape[1] // k.shape[1]
        keys, values = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * layer.scale
        if layer.soft_cap is not None:
            scores = layer.soft_cap * (scores / layer.soft_cap).tanh()
        age = torch.arange(num_all - num_new, num_all)[:, None] - torch.arange(num_all)
        hidden = age < 0 if layer.sliding_window is None else (age < 0) | (age >= layer.sliding_window)
        scores = scores.masked_fill(hidden, -torch.inf)
        if layer.sinks is not None:
            sinks = layer.sinks.float()[:, None, None].expand(-1, num_new, 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(dim=-1)[..., :num_all]
        return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


def batched(attends: Sequence[Attend], lengths: Sequence[int]) -> Attend:
    """Return the `Attend` of a step whose tokens belong to several sequences.

    Args:
        attends: one per sequence.
        lengths: tokens of each in this step.
    """

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        tensors = (torch.split_with_sizes(x, list(lengths)) for x in (q, k, v))
        parts = zip(attends, *tensors, _split(rotation, lengths), strict=True)
        return torch.cat([each(*qkv, layer, of_part) for each, *qkv, of_part in parts])

    return attend


def _split(rotation: Rotation | None, lengths: Sequence[int]) -> list[Rotation | None]:
    if rotation is None:
        return [None] * len(lengths)
    cos, sin = (torch.split_with_sizes(x, list(lengths)) for x in (rotation.cos, rotation.sin))
    return [replace(rotation, cos=each, sin=other) for each, other in zip(cos, sin, strict=True)]


class NaiveMoe(MoeKernel):
    """Each token through each of its experts in turn, in float32."""

    capabilities = MoeCapabilities(
        activations=("silu", "gelu_tanh", "swigluoai"), biases=True, swiglu_limit=True, weight_dtypes=(FP8,)
    )

    def forward(
        self, x: torch.Tensor, weights: ExpertWeights, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """See `MoeKernel.forward`."""
        check_fields(weights)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        gate_up = weights.gate_up, weights.gate_up_scales, weights.gate_up_bias
        down = weights.down, weights.down_scales, weights.down_bias
        for token, (factors, ids) in enumerate(zip(topk_weights, topk_ids, strict=True)):
            for factor, expert in zip(factors, ids, strict=True):
                gate, up = _of_expert(expert, x[token].float(), *gate_up).chunk(2)
                out[token] += factor * _of_expert(expert, activated(gate, up, self.spec), *down)
        return out.to(x.dtype)


def _of_expert(
    expert: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    matrix = dequantized(weight[expert], None if scales is None else scales[expert], torch.float32)
    return matrix @ x if bias is None else matrix @ x + bias[expert].float()


def random_reference(config: Any, seed: int = 0) -> Any:
    """A transformers model for causal language modelling with weights that make mistakes visible.

    transformers' own initialisation is so narrow that attention is nearly uniform and a wrong rotation goes unnoticed;
    here activations keep their size through every layer, and norms and biases are not trivial.

    Args:
        config: a transformers config.
        seed: of the weights.

    Returns:
        The model in float32, with plain attention.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    if hasattr(model, "set_experts_implementation"):  # since transformers 5
        model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                centre, spread = (1.0, 0.2) if name.endswith("weight") else (0.0, 0.5)
            else:
                # With tied embeddings of unit size, a token's own logit would be the largest whatever the layers do.
                embedding = 0.2 if config.tie_word_embeddings else 1.0
                centre, spread = 0.0, embedding if "embed" in name else 1.5 * weight.shape[-1] ** -0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * spread + centre)
    return model


class SavedReference(WeightSource):
    """A folder that transformers' ``save_pretrained`` wrote; the whole checkpoint is read at once."""

    @classmethod
    def unsupported(cls, path: Path) -> list[str]:
        """A folder without a config."""
        return [] if (path / "config.json").is_file() else ["the folder has no config.json"]

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def config(self) -> Mapping[str, Any]:
        """``config.json``."""
        config: dict[str, Any] = json.loads((self._path / "config.json").read_text())
        return config

    def tokenizer(self) -> Any:
        """Not saved."""
        raise NotImplementedError

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, LazyTensor]]:
        """Every tensor of every file."""
        for file in sorted(self._path.glob("*.safetensors")):
            yield from load_file(file).items()


class WithATensor(WeightSource):
    """A source with one tensor more."""

    @classmethod
    def unsupported(cls, path: Path) -> list[str]:
        """It stands on another source."""
        return ["it is no file"]

    def __init__(self, source: WeightSource, name: str) -> None:
        self._source, self._name = source, name

    @property
    def config(self) -> Mapping[str, Any]:
        """The source's."""
        return self._source.config

    def tokenizer(self) -> Any:
        """The source's."""
        return self._source.tokenizer()

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, LazyTensor]]:
        """The source's, then `name`."""
        yield from self._source.tensors(config)
        yield self._name, torch.zeros(1)
