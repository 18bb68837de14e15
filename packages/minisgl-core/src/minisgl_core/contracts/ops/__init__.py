"""The contract of the kernels between attention calls, split into roles.

Each role is a class, whose methods are the reference in plain torch and run on any device. A provider subclasses one or more
roles and overrides methods with faster kernels. `Ops` composes an engine's roles: the first provider that has a role serves it.
Shape legend of all roles: T tokens, N requests that sample a token, H hidden size, I intermediate size, V vocabulary size, E
experts, K experts per token (in the step role, step inputs per token). Hq query heads, Hkv KV heads, D head dimension, P pages, S
tokens per page, R rows and M columns of the page table.

Unless a docstring says otherwise, input tensors may have any strides and are not modified. Results have the dtype of the
inputs, usually the model's. All methods except the FP8 GEMMs must accept float32 and bfloat16.
"""

from minisgl_core.contracts.ops.composition import ROLES, Ops, TorchOps, roles_of
from minisgl_core.contracts.ops.linear import LinearOp, LinearOps
from minisgl_core.contracts.ops.norm import NormOps
from minisgl_core.contracts.ops.provider import OpsProvider
from minisgl_core.contracts.ops.rotary import Rope, RotaryOps
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
    "Rope",
    "RotaryOps",
    "RoutingOps",
    "SamplingOps",
    "StepOps",
    "TorchOps",
    "VocabShard",
    "roles_of",
]
