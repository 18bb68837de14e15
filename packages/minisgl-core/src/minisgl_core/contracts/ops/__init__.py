"""The contract of the kernels between attention calls, split into roles.

Each role is a class, and is itself the reference in plain torch, which runs on any device. A provider subclasses one or more
roles and overrides what it does faster. `Ops` puts an engine's roles together: each is served by the first provider that has it.
Shape legend of all roles: T tokens, H hidden size, D head dimension, V vocabulary size, E experts.

Where a docstring says nothing else, input tensors may have any strides and are left as they are. Results have the dtype of
the inputs: mostly the model's, but float32 and bfloat16 are taken by all but the FP8 GEMMs.
"""

from minisgl_core.contracts.ops.composition import ROLES, Ops, TorchOps, roles_of
from minisgl_core.contracts.ops.linear import LinearOp, LinearOps
from minisgl_core.contracts.ops.norm import NormOps
from minisgl_core.contracts.ops.provider import OpsProvider
from minisgl_core.contracts.ops.rotary import RotaryOps, Rotation
from minisgl_core.contracts.ops.routing import RoutingOps
from minisgl_core.contracts.ops.sampling import SamplingOps, VocabShard
from minisgl_core.contracts.ops.step import StepOps

__all__ = [
    "ROLES",
    "LinearOp",
    "LinearOps",
    "NormOps",
    "Ops",
    "OpsProvider",
    "RotaryOps",
    "Rotation",
    "RoutingOps",
    "SamplingOps",
    "StepOps",
    "TorchOps",
    "VocabShard",
    "roles_of",
]
