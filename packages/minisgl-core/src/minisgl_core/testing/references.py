"""References of the kits: attention without pages, experts one token at a time, and checkpoints from transformers."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from minisgl_core.contracts.attention import AttentionLayer
from minisgl_core.contracts.model import Attend
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.contracts.moe import MXFP4, UINT4, ExpertWeights, MoeCapabilities, MoeKernel
from minisgl_core.contracts.ops import Rope, RotaryOps
from minisgl_core.contracts.weights import LazyTensor, WeightSource
from minisgl_core.testing.attention_rig import dense_attention
from minisgl_core.testing.moe_cases import activated, check_fields, dequantized
from minisgl_core.utils.fp8 import FP8


class DenseAttention:
    """`Attend` of one sequence, which stores all keys and values and computes `dense_attention`."""

    def __init__(self) -> None:
        self._past: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        rope: Rope | None = None,
    ) -> torch.Tensor:
        """Attend with q [T, Hq, D], k and v [T, Hkv, D] of the sequence's next T tokens, and return [T, Hq, D]."""
        if rope is not None:
            q, k = RotaryOps(q.device, q.dtype).qk_norm_rope(q, k, rope)
        if layer.index in self._past:
            past_k, past_v = self._past[layer.index]
            k, v = torch.cat((past_k, k)), torch.cat((past_v, v))
        self._past[layer.index] = (k.clone(), v.clone())
        return dense_attention(q, k, v, layer).to(q.dtype)


def batched(attends: Sequence[Attend], lengths: Sequence[int]) -> Attend:
    """Return the `Attend` of a step whose tokens belong to several sequences.

    Args:
        attends: one per sequence.
        lengths: tokens of each sequence in this step.
    """

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        rope: Rope | None = None,
    ) -> torch.Tensor:
        tensors = (torch.split_with_sizes(x, list(lengths)) for x in (q, k, v))
        parts = zip(attends, *tensors, _split(rope, lengths), strict=True)
        return torch.cat([each(*qkv, layer, part_rope) for each, *qkv, part_rope in parts])

    return attend


def _split(rope: Rope | None, lengths: Sequence[int]) -> list[Rope | None]:
    if rope is None:
        return [None] * len(lengths)
    cos, sin = (torch.split_with_sizes(x, list(lengths)) for x in (rope.cos, rope.sin))
    return [replace(rope, cos=each, sin=other) for each, other in zip(cos, sin, strict=True)]


class NaiveMoe(MoeKernel):
    """MoE kernel that computes each expert of each token in turn, in float32."""

    capabilities = MoeCapabilities(
        activations=("silu", "gelu_tanh", "swigluoai"),
        biases=True,
        swiglu_limit=True,
        weight_dtypes=(FP8, UINT4, MXFP4),
    )

    def forward(
        self, x: torch.Tensor, weights: ExpertWeights, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """See `MoeKernel.forward`."""
        check_fields(weights)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        gate_up = weights.gate_up, weights.gate_up_scales, weights.gate_up_bias, weights.gate_up_zeros
        down = weights.down, weights.down_scales, weights.down_bias, weights.down_zeros
        for token, (factors, ids) in enumerate(zip(topk_weights, topk_ids, strict=True)):
            for factor, expert in zip(factors, ids, strict=True):
                gate, up = _expert_linear(expert, x[token].float(), *gate_up).chunk(2)
                out[token] += factor * _expert_linear(expert, activated(gate, up, self.spec), *down)
        return out.to(x.dtype)


def _expert_linear(
    expert: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    zeros: torch.Tensor | None,
) -> torch.Tensor:
    scale, zero = (None if each is None else each[expert] for each in (scales, zeros))
    wide = dequantized(weight[expert], scale, torch.float32, zero, len(x))
    return wide @ x if bias is None else wide @ x + bias[expert].float()


def random_reference(config: Any, seed: int = 0) -> Any:
    """Return a transformers model for causal language modelling with random weights that make mistakes visible.

    With transformers' own initialisation, attention is nearly uniform, which hides wrong positions. Here activations keep their
    size through all layers, and norms and biases are random.

    Args:
        config: a transformers config.
        seed: seed of the weights.

    Returns:
        The model in float32, with eager attention.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    if hasattr(model, "set_experts_implementation"):  # since transformers 5
        model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        kept = model.state_dict()
        buffers = [each for each in model.named_buffers() if each[0] in kept]  # a router's correction bias
        for name, weight in (*model.named_parameters(), *buffers):
            if weight.ndim == 1:
                centre, spread = (1.0, 0.2) if name.endswith("weight") else (0.0, 0.5)
            else:
                # With tied embeddings of unit size, the input token always has the largest logit, which hides mistakes.
                embedding = 0.2 if config.tie_word_embeddings else 1.0
                centre, spread = 0.0, embedding if "embed" in name else 1.5 * weight.shape[-1] ** -0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * spread + centre)
    return model


class SavedReference(WeightSource):
    """Weight source for a folder that transformers' ``save_pretrained`` wrote. It loads whole files."""

    @classmethod
    def unsupported(cls, path: Path) -> list[str]:
        """Refuse folders without a config.json."""
        return [] if (path / "config.json").is_file() else ["the folder has no config.json"]

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def config(self) -> Mapping[str, Any]:
        """Content of ``config.json``."""
        config: dict[str, Any] = json.loads((self._path / "config.json").read_text())
        return config

    def tokenizer(self) -> Any:
        """Raise NotImplementedError, as no tokenizer is saved."""
        raise NotImplementedError

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, LazyTensor]]:
        """Yield all tensors of all files."""
        for file in sorted(self._path.glob("*.safetensors")):
            yield from load_file(file).items()


class WithExtraTensor(WeightSource):
    """Weight source with the tensors of another source and one more, which is called `name`."""

    @classmethod
    def unsupported(cls, path: Path) -> list[str]:
        """Refuse any path, since the source is built from another source."""
        return ["it is not read from a path"]

    def __init__(self, source: WeightSource, name: str) -> None:
        self._source, self._name = source, name

    @property
    def config(self) -> Mapping[str, Any]:
        """Config of the other source."""
        return self._source.config

    def tokenizer(self) -> Any:
        """Return the tokenizer of the other source."""
        return self._source.tokenizer()

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, LazyTensor]]:
        """Yield the tensors of the other source, then the added one."""
        yield from self._source.tensors(config)
        yield self._name, torch.zeros(1)
