"""Allocation of a rank's parameters, and checks that several layers share."""

from typing import NoReturn

import torch
from torch import nn

from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.errors import ModelFormatError


def empty_parameter(*shape: int, build: BuildContext, zero: bool = False) -> nn.Parameter:
    """Allocate a parameter of this rank: uninitialised, or zeros if `zero`, as padding is not loaded."""
    make = torch.zeros if zero else torch.empty
    return nn.Parameter(make(shape, device=build.device, dtype=build.dtype), requires_grad=False)


def not_prepared(*_: torch.Tensor) -> NoReturn:
    """Raise AssertionError. A layer calls this until `prepare` sets its operation."""
    raise AssertionError("the weights have not been loaded (minisgl_core.weights.loader.load_weights)")


def check_activation(config: ModelConfig, *allowed: str) -> None:
    """Raise ModelFormatError if the config's activation is not among `allowed`, by default silu."""
    if config.hidden_act not in (allowed or ("silu", "swish")):
        names = " or ".join(map(repr, allowed or ("silu",)))
        raise ModelFormatError(f"config: hidden_act={config.hidden_act!r} is not supported; only {names} is")
