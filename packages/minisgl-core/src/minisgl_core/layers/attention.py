"""Self-attention around the paged attention backend."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import torch

from minisgl_core.config.model import ModelConfig
from minisgl_core.contracts.attention import AttentionLayer
from minisgl_core.contracts.model import Attend, BuildContext
from minisgl_core.contracts.ops import Rotation
from minisgl_core.contracts.weights import WeightTarget
from minisgl_core.errors import ModelFormatError
from minisgl_core.fp8 import FP8
from minisgl_core.layers.base import Layer, SumOverRanks, check_tp_size
from minisgl_core.layers.linear import QKVParallelLinear, RowParallelLinear, Targets
from minisgl_core.layers.norm import RMSNorm

_SCALE_NAMES = ("{name}.{part}_scale", "{name}.{part}_proj.{part}_scale", "{name}.{part}_proj.output_scale")
"""What a checkpoint may call the scale of K or V: as llm-compressor, ModelOpt and AutoFP8 write it."""


class Attention(Layer):
    """Projections, optional norms of queries and keys, rotation, attention, output projection.

    Shape legend: T tokens, Hq and Hkv heads of this rank, D head dimension.
    """

    def __init__(self, config: ModelConfig, index: int, build: BuildContext, *, qk_norm: bool = False) -> None:
        """`index` is the layer's place in the model and in the KV pool.

        Raises:
            InvalidValueError: the heads cannot be split over ``build.tp_size`` ranks.
        """
        super().__init__()
        check_tp_size(config, build.tp_size)
        dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, dim, config.num_q_heads, config.num_kv_heads, build, bias=config.qkv_bias
        )
        self.o_proj = RowParallelLinear(config.num_q_heads * dim, config.hidden_size, build, bias=config.o_bias)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps, build) if qk_norm else None
        self.k_norm = RMSNorm(dim, config.rms_norm_eps, build) if qk_norm else None
        self.layer = AttentionLayer(index, dim**-0.5, config.sliding_windows[index])
        self._kv_scales = torch.ones(2) if build.kv_dtype == FP8 else None
        self._eps = config.rms_norm_eps
        self._heads = [self.qkv_proj.num_q_heads, self.qkv_proj.num_kv_heads, self.qkv_proj.num_kv_heads]
        self._view = (-1, sum(self._heads), dim)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        """x [T, hidden_size] to the same; cos and sin [T, rotary_dim / 2] of the tokens' positions."""
        # Tensor.split goes through Python and takes twice as long.
        q, k, v = torch.split_with_sizes(self.qkv_proj(x).view(self._view), self._heads, 1)
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = self.q_norm.weight, self.k_norm.weight
        rotation = Rotation(cos, sin, norms, self._eps)
        out: torch.Tensor = self.o_proj(attend(q, k, v, self.layer, rotation).flatten(1))
        return out

    def last_sum(self) -> SumOverRanks | None:
        """The output projection's. See `Layer`."""
        return self.o_proj.last_sum()

    def weight_targets(self, name: str) -> Targets:
        """Under Hugging Face's names for Llama and its kin."""
        yield from self.qkv_proj.weight_targets(f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
        yield from self.o_proj.weight_targets(f"{name}.o_proj")
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.weight_targets(f"{name}.q_norm")
            yield from self.k_norm.weight_targets(f"{name}.k_norm")
        if self._kv_scales is not None:
            for part, scale in (("k", self._kv_scales[:1]), ("v", self._kv_scales[1:])):
                for pattern in _SCALE_NAMES:
                    yield pattern.format(name=name, part=part), WeightTarget(scale, optional=True)

    def prepare(self) -> None:
        """Take note of the scales of K and V, where the checkpoint has some and the pool is fp8.

        Raises:
            ModelFormatError: one of them is no positive number.
        """
        if self._kv_scales is not None:
            k, v = self._kv_scales.tolist()
            if not (0 < k < inf and 0 < v < inf):
                raise ModelFormatError(
                    f"layer {self.layer.index}: the scales of K and V are {k:g} and {v:g}, not positive"
                )
            self.layer = replace(self.layer, kv_scales=(k, v))
