"""Composition of an engine's ops from providers, one per role."""

from dataclasses import dataclass
from typing import Any

import torch

from minisgl_core.contracts.ops.linear import LinearOps
from minisgl_core.contracts.ops.norm import NormOps
from minisgl_core.contracts.ops.provider import OpsProvider
from minisgl_core.contracts.ops.rotary import RotaryOps
from minisgl_core.contracts.ops.routing import RoutingOps
from minisgl_core.contracts.ops.sampling import SamplingOps
from minisgl_core.contracts.ops.step import StepOps

ROLES: dict[str, type[OpsProvider]] = {
    "linear": LinearOps,
    "norm": NormOps,
    "rotary": RotaryOps,
    "sampling": SamplingOps,
    "step": StepOps,
    "routing": RoutingOps,
}
"""Class of each role, by the name of its field of `Ops`."""


def roles_of(provider: type[OpsProvider]) -> list[str]:
    """Return the names of the roles that a provider has, in the order of `ROLES`."""
    return [name for name, role in ROLES.items() if issubclass(provider, role)]


class TorchOps(LinearOps, NormOps, RotaryOps, SamplingOps, StepOps, RoutingOps):
    """Provider ``torch``: every role in plain torch, the reference for other providers."""


@dataclass(frozen=True, slots=True)
class Ops:
    """Kernels that an engine runs between attention calls, by role.

    Attributes:
        device: device of all tensors.
        dtype: dtype of the model.
        linear: GEMMs.
        norm: norms and activations.
        rotary: rotary embedding and KV store.
        sampling: masks, sampling and argmax.
        step: step inputs and outputs, and embedding lookups.
        routing: selection of experts.
    """

    device: torch.device
    dtype: torch.dtype
    linear: LinearOps
    norm: NormOps
    rotary: RotaryOps
    sampling: SamplingOps
    step: StepOps
    routing: RoutingOps

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype, *providers: type[OpsProvider]) -> "Ops":
        """Assign each role to the first of `providers` that has it, or to `TorchOps` if none has.

        Providers without an assigned role are not instantiated.
        """
        chosen = {
            name: next(provider for provider in (*providers, TorchOps) if issubclass(provider, role))
            for name, role in ROLES.items()
        }
        instances = {provider: provider(device, dtype) for provider in dict.fromkeys(chosen.values())}
        parts: dict[str, Any] = {name: instances[provider] for name, provider in chosen.items()}
        return cls(device, dtype, **parts)
