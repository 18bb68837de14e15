"""References of the kits: attention without pages, experts in float64, and checkpoints from transformers."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from minisgl_core.contracts.attention import AttentionLayer
from minisgl_core.contracts.model import Attend
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.contracts.moe import MXFP4, UINT4, ExpertWeights, MoeCapabilities, MoeKernel
from minisgl_core.contracts.ops import Rope, RotaryOps
from minisgl_core.contracts.weights import LazyTensor
from minisgl_core.testing.attention_rig import dense_attention
from minisgl_core.testing.moe_cases import MoeCase, expected_output
from minisgl_core.utils.fp8 import FP8
from minisgl_core.weights.safetensors_folder import SafetensorsWeights


class DenseAttention:
    """`Attend` of one sequence, which stores all keys and values and computes `dense_attention`."""

    def __init__(self) -> None:
        self._past: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, rope: Rope | None = None
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
    """Return the `Attend` of a step with these numbers of tokens of several sequences, given that of each sequence."""

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, rope: Rope | None = None
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
    """MoE kernel that computes all experts for all tokens in float64; see `expected_output`."""

    capabilities = MoeCapabilities(
        activations=("silu", "gelu_tanh", "swigluoai"),
        biases=True,
        swiglu_limit=True,
        weight_dtypes=(FP8, UINT4, MXFP4),
    )

    def forward(
        self, x: torch.Tensor, weights: ExpertWeights, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        return expected_output(MoeCase(x, weights, topk_weights, topk_ids), self.spec).to(x)


def random_reference(config: Any, seed: int = 0) -> Any:
    """Return a transformers model in float32, with eager attention and random weights that make mistakes visible.

    With transformers' own initialisation, attention is nearly uniform, which hides wrong positions. Here activations keep their
    size through all layers, and norms and biases are random.

    Args:
        config: transformers config of a model for causal language modelling.
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
            if weight.ndim < 2:
                centre, spread = (1.0, 0.2) if name.endswith("weight") else (0.0, 0.5)
            else:
                # With tied embeddings of unit size, the input token always has the largest logit, which hides mistakes.
                embedding = 0.2 if config.tie_word_embeddings else 1.0
                centre, spread = 0.0, embedding if "embed" in name else 1.5 * weight.shape[-1] ** -0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * spread + centre)
    return model


class WithExtraTensor(SafetensorsWeights):
    """Folder of safetensors files, with one more tensor that is called `extra`."""

    def __init__(self, path: Path, extra: str) -> None:
        super().__init__(path)
        self._extra = extra

    def stored_tensors(self, config: ModelConfig, wanted: Container[str]) -> Iterator[tuple[str, LazyTensor]]:
        yield from super().stored_tensors(config, wanted)
        yield self._extra, torch.zeros(1)
