"""The seam for model architectures. The entry point's name is the Hugging Face architecture."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from minisgl_core.config.model import ModelConfig
from minisgl_core.contracts.attention import AttentionLayer
from minisgl_core.contracts.communicator import Communicator
from minisgl_core.contracts.moe import MoeKernel
from minisgl_core.contracts.ops import Ops, Rotation, VocabShard
from minisgl_core.contracts.quantization import Quantization
from minisgl_core.contracts.weights import WeightTarget


@dataclass(frozen=True, slots=True)
class BuildContext:
    """What a model is built with; passed down to every layer.

    Attributes:
        communicator: the tensor-parallel group; its rank and size decide what part of each matrix a layer holds.
        ops: the arithmetic between attention calls.
        device: where parameters lie.
        dtype: of parameters and activations.
        moe_kernel: the class that runs experts; None where the model has none.
        kv_dtype: of the KV pool; None for `dtype`.
        quantization: what multiplies by the layers' matrices, with `moe_kernel` by those of experts; None for `ops`.
    """

    communicator: Communicator
    ops: Ops
    device: torch.device
    dtype: torch.dtype
    moe_kernel: type[MoeKernel] | None = None
    kv_dtype: torch.dtype | None = None
    quantization: Quantization | None = None

    @property
    def products(self) -> Ops | Quantization:
        """Who prepares matrices that may be quantised: all but the output matrix, embeddings and routers."""
        return self.quantization or self.ops

    @property
    def tp_rank(self) -> int:
        """This process in the tensor-parallel group."""
        return self.communicator.rank

    @property
    def tp_size(self) -> int:
        """Ranks in the tensor-parallel group."""
        return self.communicator.size


class Attend(Protocol):
    """Attention of the current step: stores k and v, attends over the pool."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] to [T, Hq, D]. With `rotation`, q and k are rotated first, maybe in place."""


class Model(nn.Module, ABC):
    """A decoder-only language model, sharded over the ranks of its `BuildContext`."""

    plugin_api: ClassVar[str] = ">=2,<3"
    config: ModelConfig

    @classmethod
    def standard_config(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """A checkpoint's config under the keys that `model_config` reads.

        Override it where the architecture's own config has others (``n_embd``), or is silent about what is not as in Llama.
        """
        return raw

    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        """Say why this class cannot run `config` (an option it lacks), one sentence a reason; empty if it can."""
        return []

    @abstractmethod
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        """Allocate this rank's parameters, uninitialised, on ``build.device``. Subclasses call it first.

        Raises:
            InvalidValueError: the model cannot be split over ``build.tp_size`` ranks (``--tp``).
        """
        super().__init__()
        self.config = config

    @abstractmethod
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Run the layers.

        Where steps are recorded as device graphs it is called once for a number of tokens, with padding among them, and its
        kernels are replayed from then on: so nothing on the host may depend on the values of tensors.

        Args:
            input_ids: int32 or int64 [T].
            positions: place of each token in its sequence, like `input_ids`.
            attend: attention of this step.

        Returns:
            Hidden states after the final norm, [T, hidden_size].
        """

    def forward_rows(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, rows: torch.Tensor
    ) -> torch.Tensor:
        """`forward`, of which only some tokens' hidden states are wanted: of most prompts, the last one's.

        Override it to compute no more than that in the last layer. Recorded as `forward` is.

        Args:
            input_ids: see `forward`.
            positions: likewise.
            attend: attention of this step.
            rows: places of the wanted tokens in the step, int32 [N], at least one.

        Returns:
            [N, hidden_size].
        """
        hidden: torch.Tensor = self(input_ids, positions, attend)
        return hidden.index_select(0, rows)

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden_size] to [N, vocab_size], the whole vocabulary on every rank, in the model's dtype.

        Recorded with steps of decodes, as `forward` is.
        """

    def vocab_shard(self) -> VocabShard | None:
        """Which logits `compute_own_logits` gives; None where those are all."""
        return None

    def compute_own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`compute_logits` of this rank's part of the vocabulary, as `vocab_shard` says."""
        return self.compute_logits(hidden)

    @abstractmethod
    def attention_layers(self) -> list[AttentionLayer]:
        """Every layer that needs a place in the KV pool, by index."""

    @abstractmethod
    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """For each tensor of the checkpoint, its name and where this rank's part of it goes.

        A name may come twice (a tied embedding); each tensor named must be in the checkpoint, unless its target is optional.
        """

    def ignored_weights(self) -> tuple[str, ...]:
        """Patterns (fnmatch) of checkpoint tensors that the model does not use, such as ``*.rotary_emb.inv_freq``.

        Scales of K and V are used where the pool is fp8 (`WeightTarget.optional`), and mean nothing elsewhere.
        """
        return "*.rotary_emb.inv_freq", "*.[qkv]_scale", "*.[qkv]_proj.output_scale"

    def finalize(self) -> None:
        """Called once after loading: layers hand their matrices to `BuildContext.products`."""
        for module in self.modules():
            prepare = getattr(module, "prepare", None)
            if prepare is not None and module is not self:
                prepare()
