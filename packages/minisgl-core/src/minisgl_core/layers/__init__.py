"""Layers from which models are built, sharded over tensor-parallel ranks.

Each layer is built with a `BuildContext` and has this rank's shard of its weights.
"""

from minisgl_core.contracts.layer import Layer
from minisgl_core.layers.attention import Attention
from minisgl_core.layers.base import check_activation
from minisgl_core.layers.causal_lm import CausalLM
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
    "CausalLM",
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
