"""Contract of model architectures. The entry point's name is the Hugging Face architecture."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from minisgl_core.contracts.attention import AttentionLayer
from minisgl_core.contracts.communicator import Communicator
from minisgl_core.contracts.layer import FusedProjections, Layer
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.contracts.moe import MoeKernel
from minisgl_core.contracts.ops import Ops, Rope, VocabShard
from minisgl_core.contracts.quantization import Quantization, QuantizationSpec


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """Part of a model that a rank builds.

    Attributes:
        layers: indices of its decoder layers.
        has_embedding: True for the first stage, and for the last stage of a model with tied embeddings.
        has_lm_head: True for the last stage, which has the final norm and the LM head.
    """

    layers: range
    has_embedding: bool
    has_lm_head: bool


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Arguments of a model's construction, which are passed down to every layer.

    Attributes:
        communicator: tensor-parallel group. Its rank and size determine the shard of each weight.
        ops: kernels between attention calls, by role.
        device: device of the parameters.
        dtype: dtype of parameters and activations.
        moe_kernel: class that runs experts; None for dense models.
        kv_dtype: dtype of the KV pool; None for `dtype`.
        quantization: provider of the methods of linear layers and experts; None for weights in the model's dtype.
        layers: decoder layers of this rank's pipeline stage; None for all.
    """

    communicator: Communicator
    ops: Ops
    device: torch.device
    dtype: torch.dtype
    moe_kernel: type[MoeKernel] | None = None
    kv_dtype: torch.dtype | None = None
    quantization: Quantization | None = None
    layers: range | None = None

    def stage(self, config: ModelConfig) -> PipelineStage:
        """Return the pipeline stage to build, which is the whole model unless `layers` is set."""
        layers = range(config.num_layers) if self.layers is None else self.layers
        assert 0 <= layers.start < layers.stop <= config.num_layers, f"{layers} of {config.num_layers} layers"
        is_first, is_last = layers.start == 0, layers.stop == config.num_layers
        return PipelineStage(layers, is_first or (is_last and config.tie_embeddings), is_last)

    @property
    def unquantized(self) -> Quantization:
        """Provider that keeps weights in `dtype`: for layers that `quantization` does not serve, such as MoE gates.

        It also serves the LM head, unless `Quantization.embedding` returns a method.
        """
        return Quantization(QuantizationSpec(self.dtype, self.device), self.ops)

    @property
    def tp_rank(self) -> int:
        """Rank of this process in the tensor-parallel group."""
        return self.communicator.rank

    @property
    def tp_size(self) -> int:
        """Ranks in the tensor-parallel group."""
        return self.communicator.size


class Attend(Protocol):
    """Attention of the current step: it stores k and v in the KV pool and attends over the pool."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, rope: Rope | None = None
    ) -> torch.Tensor:
        """Return the output [T, Hq, D] of q [T, Hq, D], k and v [T, Hkv, D].

        If `rope` is given, its QK norm (if there is one) and RoPE are applied to q and k first, possibly in place.
        """


class Model(Layer, ABC):
    """Decoder-only language model, sharded over the ranks of its `BuildContext`.

    Attributes are named after the checkpoint's tensors (see `Layer`), except the fused projections in `fused_projections`.

    Attributes:
        fused_projections: attribute names of fused projections, with the checkpoint's names of their parts in the order of the
            rows. Empty if the checkpoint stores the fused tensors, as Phi-3's does.
        num_intermediate: tensors [T, hidden_size] that a pipeline stage passes to the next one: 2 for hidden states and
            residual, 1 if the layers have no separate residual.
        config: config of the whole model.
        stage: pipeline stage that was built.
        vocab_shard: part of the vocabulary that `compute_logits` returns; None for all of it.
    """

    plugin_api: ClassVar[str] = ">=2,<3"
    fused_projections: ClassVar[FusedProjections] = {}
    num_intermediate: ClassVar[int] = 2
    config: ModelConfig
    stage: PipelineStage
    vocab_shard: VocabShard | None = None

    @classmethod
    def standard_config(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a checkpoint's config under the keys that `model_config` reads.

        Override it if the architecture's config has other keys (``n_embd``), or defaults that differ from Llama's.
        """
        return raw

    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        """Return the reasons why this class does not support `config`, one sentence each; empty if it does."""
        return []

    @abstractmethod
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        """Allocate this rank's parameters, uninitialised, on ``build.device``. Subclasses call it first.

        A rank builds only its pipeline stage, ``build.stage(config)``.

        Raises:
            InvalidValueError: the model cannot be split over ``build.tp_size`` ranks (``--tp``).
        """
        self.config, self.stage = config, build.stage(config)

    @abstractmethod
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        logits_index: torch.Tensor | None = None,
        intermediate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layers of this pipeline stage.

        CUDA graphs capture it once per capture size and replay its kernels, with padding tokens. So nothing on the host may
        depend on the values of tensors.

        Args:
            input_ids: int32 or int64 [T].
            positions: position of each token in its sequence, like `input_ids`.
            attend: attention of this step.
            logits_index: tokens of the step whose hidden states are returned, int32 [N], at least one; None for all. For a
                prompt, this is usually its last token. The last layer may skip the other tokens after attention. Always None
                with several tensor-parallel ranks, because a fused all-reduce + RMSNorm may distribute the residual over
                them. Always None if the stage is not the last one.
            intermediate: output of the same tensor-parallel rank in the previous stage, [num_intermediate, T, hidden_size]; may
                be overwritten. None in the first stage, which embeds `input_ids`.

        Returns:
            Hidden states after the final norm, [T, hidden_size] or [N, hidden_size]. A stage that is not the last one returns
            the output of its last layer instead, such as ``torch.stack((hidden_states, residual))``. It has the model's dtype
            and shape [num_intermediate, T, hidden_size]. With several tensor-parallel ranks, the hidden
            states may be this rank's partial sums, and the residual valid in this rank's rows only; see
            `Communicator.all_reduce_add_norm`.
        """

    @abstractmethod
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the logits (see `vocab_shard`), in the model's dtype.

        CUDA graphs capture it with decode steps, like `forward`.

        Args:
            hidden_states: [N, hidden_size].
        """

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of the whole vocabulary, [N, vocab_size], from every rank's part. Every rank calls it."""
        return logits if self.vocab_shard is None else self.vocab_shard.gather(logits)

    @abstractmethod
    def attention_layers(self) -> list[AttentionLayer]:
        """Return the attention layers of this pipeline stage in order. Their indices in the KV pool count from 0."""

    def tensor_name(self, stored: str) -> str | None:
        """Return the model's name of a checkpoint's tensor; None if the model does not use it.

        Override it for an architecture whose checkpoints have several names for a tensor. By default, both names are the same.
        """
        return stored

    def ignored_weights(self) -> tuple[str, ...]:
        """Return patterns (fnmatch) of checkpoint tensors that the model does not use, such as ``*.rotary_emb.inv_freq``.

        Scales of K and V are used only with an FP8 pool (`WeightTarget.optional`). A checkpoint with tied embeddings may
        contain a copy of the LM head.
        """
        tied = ("lm_head.weight",) if self.config.tie_embeddings else ()
        return "*.rotary_emb.inv_freq", "*.[qkv]_scale", "*.[qkv]_proj.output_scale", *tied

    def weights_of_other_stages(self) -> tuple[str, ...]:
        """Return patterns (fnmatch) of checkpoint tensors that only other pipeline stages load; empty for a whole model.

        Override it if the checkpoint's names are not those of Llama (``model.layers.0``, ``model.embed_tokens`` and so on).
        """
        stage, indices = self.stage, range(self.config.num_layers)
        layers = (f"model.layers.{index}.*" for index in indices if index not in stage.layers)
        embedding = () if stage.has_embedding else ("model.embed_tokens.*",)
        return *layers, *embedding, *(() if stage.has_lm_head else ("model.norm.*", "lm_head.*"))
