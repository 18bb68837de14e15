"""Tensors of a transformers model: allocation, initial values of its buffers, and names in checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from typing import Any

import torch
from torch import nn

from minisgl_core.errors import ModelFormatError


def fill_buffers(model: Any, device: torch.device) -> None:
    """Allocate the buffers of a model on the meta device, and compute those that checkpoints lack, such as RoPE's frequencies.

    transformers computes them as `from_pretrained` does, by ``initialize_weights``, which leaves parameters alone.

    Raises:
        ModelFormatError: transformers does not compute one of them.
    """
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    for module in model.modules():
        module._is_hf_initialized = False
        for name, buffer in module._buffers.items():
            if buffer is not None:
                unset = float("nan") if buffer.is_floating_point() else 0
                module._buffers[name] = torch.full_like(buffer, unset, device=device)
    model.initialize_weights()
    stored = {name for name, _ in stored_tensors(model)}
    for name, buffer in model.named_buffers():
        if name not in stored and buffer.isnan().any():
            raise ModelFormatError(f"transformers does not compute the values of {name}")


def allocate_parameters(model: nn.Module, device: torch.device) -> None:
    """Allocate the parameters of a model on the meta device, uninitialised. Tied ones stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in made:
                    made[parameter] = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False)
                module._parameters[name] = made[parameter]


def stored_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters, and the buffers that checkpoints have; tied ones once."""
    yield from model.named_parameters()
    transient = {f"{path}.{name}" for path, module in model.named_modules() for name in module._non_persistent_buffers_set}
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name not in transient)


class TensorNames:
    """Translates names of checkpoints to those of a model's modules, as `from_pretrained` does."""

    def __init__(self, model: Any, prefix: str, known: Set[str]) -> None:
        """Take the rules of a model.

        Args:
            model: of transformers.
            prefix: name of its backbone, which checkpoints of the backbone alone leave out.
            known: names of the tensors that the model takes.
        """
        self._prefix, self._known = f"{prefix}.", known
        self._ignored = [re.compile(each) for each in model._keys_to_ignore_on_load_unexpected or ()]

    def __call__(self, stored: str) -> str | None:
        """Return the model's name; None for a tensor that transformers ignores. An unknown name is returned as it is."""
        for name in (stored, f"{self._prefix}{stored}", stored.removeprefix(self._prefix)):
            if name in self._known:
                return name
        return None if any(each.search(stored) for each in self._ignored) else stored
