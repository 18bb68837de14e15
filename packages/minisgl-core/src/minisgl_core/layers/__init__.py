"""The parts that models are built of, sharded over tensor-parallel ranks.

Every layer takes a `BuildContext` and holds this rank's part of its weights. A model's file puts them together.
"""

from minisgl_core.contracts.layer import Layer
from minisgl_core.layers.attention import Attention
from minisgl_core.layers.base import check_activation
from minisgl_core.layers.embedding import LMHead, VocabParallelEmbedding
from minisgl_core.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from minisgl_core.layers.moe import FusedMoE
from minisgl_core.layers.norm import RMSNorm, ShardedRMSNorm
from minisgl_core.layers.rotary import RotaryEmbedding

__all__ = [
    "Attention",
    "FusedMoE",
    "LMHead",
    "Layer",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "RMSNorm",
    "ReplicatedLinear",
    "RotaryEmbedding",
    "RowParallelLinear",
    "ShardedRMSNorm",
    "VocabParallelEmbedding",
    "check_activation",
]
