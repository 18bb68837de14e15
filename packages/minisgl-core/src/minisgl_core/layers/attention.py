"""The paged attention of one decoder layer."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import torch

from minisgl_core.contracts.attention import AttentionLayer
from minisgl_core.contracts.layer import Layer, PackedModules, Targets
from minisgl_core.contracts.model import Attend, BuildContext
from minisgl_core.contracts.ops import Rotation
from minisgl_core.contracts.shard import sharded_target
from minisgl_core.contracts.weights import WeightTarget
from minisgl_core.errors import ModelFormatError
from minisgl_core.layers.base import Shard, empty_parameter
from minisgl_core.utils.fp8 import FP8

_SCALE_NAMES = ("{name}.{part}_scale", "{name}.{part}_proj.{part}_scale", "{name}.{part}_proj.output_scale")
"""Names of the scale of K or V in checkpoints of llm-compressor, ModelOpt and AutoFP8."""


class Attention(Layer):
    """Stores K and V and attends, with the constants of one layer, its attention sinks and, in an fp8 pool, its KV scales.

    Attributes:
        layer: the constants.
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
        """See `AttentionLayer`.

        Args:
            index: the decoder layer's; in the KV pool, a rank's layers count from 0.
            scale: of the scores.
            sliding_window: in tokens; None for all.
            build: ranks, device and dtype.
            soft_cap: of the scores.
            num_sinks: query heads of the whole model, each with an attention sink; 0 without. The checkpoint's tensor is called
                ``sinks`` and belongs to the attention around this layer, as in gpt-oss.
        """
        place = index - (build.layers.start if build.layers else 0)
        self._name = f"layer {index}"
        self._shard = Shard.of(num_sinks, build)
        self._sinks = empty_parameter(self._shard.size, build=build) if num_sinks else None
        self.layer = AttentionLayer(place, scale, sliding_window, soft_cap=soft_cap, sinks=self._sinks)
        self._kv_scales = torch.ones(2) if build.kv_dtype == FP8 else None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attend: Attend, rotation: Rotation | None = None
    ) -> torch.Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] to [T, Hq, D]; see `Attend`."""
        return attend(q, k, v, self.layer, rotation)

    def weight_targets(self, name: str, packed: PackedModules) -> Targets:
        """Yield sinks and scales, which belong to the attention around this layer; a checkpoint may lack the scales."""
        parent = name.rpartition(".")[0]
        if self._sinks is not None:
            yield f"{parent}.sinks", sharded_target(self._sinks, self._shard)
        if self._kv_scales is not None:
            for part, scale in (("k", self._kv_scales[:1]), ("v", self._kv_scales[1:])):
                for pattern in _SCALE_NAMES:
                    yield pattern.format(name=parent, part=part), WeightTarget(scale, optional=True)

    def prepare(self) -> None:
        """Take note of the scales.

        Raises:
            ModelFormatError: one of them is no positive number.
        """
        if self._kv_scales is not None:
            k, v = self._kv_scales.tolist()
            if not (0 < k < inf and 0 < v < inf):
                raise ModelFormatError(f"{self._name}: the scales of K and V are {k:g} and {v:g}, not positive")
            self.layer = replace(self.layer, kv_scales=(k, v))
