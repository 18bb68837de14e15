"""Paged attention of one decoder layer."""

from dataclasses import replace
from math import inf

import torch

from minisgl_core.contracts.attention import AttentionLayer
from minisgl_core.contracts.layer import FusedProjections, Layer, Targets
from minisgl_core.contracts.model import Attend, BuildContext
from minisgl_core.contracts.ops import Rope
from minisgl_core.contracts.shard import Shard, sharded_target
from minisgl_core.contracts.weights import WeightTarget
from minisgl_core.errors import ModelFormatError
from minisgl_core.layers.base import empty_parameter
from minisgl_core.utils.fp8 import FP8

_SCALE_NAMES = ("{name}.{part}_scale", "{name}.{part}_proj.{part}_scale", "{name}.{part}_proj.output_scale")
"""Names of the scale of K or V in checkpoints of llm-compressor, ModelOpt and AutoFP8."""


class Attention(Layer):
    """Attention of one layer, which calls the step's `Attend` with the layer's constants.

    It loads the layer's attention sinks and, for an FP8 pool, its KV scales.

    Attributes:
        layer: constants of the layer. `prepare` sets the KV scales.
    """

    def __init__(
        self,
        index: int,
        scale: float,
        sliding_window: int | None,
        build: BuildContext,
        *,
        soft_cap: float | None = None,
        num_sinks: int = 0,
    ) -> None:
        """Allocate the sinks and scales.

        Args:
            index: index of the decoder layer in the model. In the KV pool, the layers of a pipeline stage count from 0.
            scale: see `AttentionLayer`.
            sliding_window: see `AttentionLayer`.
            build: ranks, device and dtype.
            soft_cap: see `AttentionLayer`.
            num_sinks: query heads of the whole model if each has an attention sink; 0 if there are none. The checkpoint's
                tensor is ``PARENT.sinks``, where PARENT is the module that contains this layer, as in gpt-oss.
        """
        index_in_pool = index - (build.layers.start if build.layers else 0)
        self._name = f"layer {index}"
        self._shard = Shard.of(num_sinks, build.tp_rank, build.tp_size)
        self._sinks = empty_parameter(self._shard.size, build=build) if num_sinks else None
        self.layer = AttentionLayer(index_in_pool, scale, sliding_window, soft_cap=soft_cap, sinks=self._sinks)
        self._kv_scales = torch.ones(2) if build.kv_dtype == FP8 else None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attend: Attend, rope: Rope | None = None
    ) -> torch.Tensor:
        """Attend with q [T, Hq, D], k and v [T, Hkv, D], and return [T, Hq, D]; see `Attend`."""
        return attend(q, k, v, self.layer, rope)

    def weight_targets(self, name: str, fused_projections: FusedProjections) -> Targets:
        """Yield sinks and scales under the name of the module that contains this layer; the scales are optional."""
        parent = name.rpartition(".")[0]
        if self._sinks is not None:
            yield f"{parent}.sinks", sharded_target(self._sinks, self._shard)
        if self._kv_scales is not None:
            for part, scale in (("k", self._kv_scales[:1]), ("v", self._kv_scales[1:])):
                for pattern in _SCALE_NAMES:
                    yield pattern.format(name=parent, part=part), WeightTarget(scale, optional=True)

    def prepare(self) -> None:
        """Set the loaded KV scales in `layer`.

        Raises:
            ModelFormatError: a scale is not a positive, finite number.
        """
        if self._kv_scales is not None:
            k, v = self._kv_scales.tolist()
            if not (0 < k < inf and 0 < v < inf):
                raise ModelFormatError(
                    f"{self._name}: the scales of K and V are {k:g} and {v:g}, but k_scale and v_scale must be positive "
                    "and finite; --kv-dtype auto does not use them"
                )
            self.layer = replace(self.layer, kv_scales=(k, v))
