"""Split of a transformers causal LM into its backbone, and a head from hidden states to logits.

The head is the model's own `forward` with `IdentityBackbone` as backbone, so that logit scales and soft caps are applied.
"""

from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from minisgl_core.errors import ModelFormatError


class _Output(BaseModelOutputWithPast):  # type: ignore[misc]  # transformers has no types
    """A backbone's output whose other fields, such as router logits, are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class IdentityBackbone(nn.Module):
    """Stand-in for a backbone, which returns the embeddings that it is given."""

    @property
    def decoder(self) -> "IdentityBackbone":
        """Return this module, too, for the part of the backbone that OPT's head calls."""
        return self

    def forward(self, *args: Any, inputs_embeds: torch.Tensor | None = None, **kwargs: Any) -> BaseModelOutputWithPast:
        """Return inputs_embeds [1, N, H] in an output as ``last_hidden_state``.

        Raises:
            ModelFormatError: the model does not pass them on.
        """
        if inputs_embeds is None:
            raise ModelFormatError("its forward does not pass inputs_embeds to the backbone")
        return _Output(last_hidden_state=inputs_embeds)


def backbone_name(model: Any) -> str:
    """Return the name of the attribute that holds the backbone: `base_model_prefix`, or ``model`` if that names no attribute.

    Raises:
        ModelFormatError: the model has none.
    """
    for name in (model.base_model_prefix, "model"):
        if isinstance(getattr(model, name, None), nn.Module):
            return name
    raise ModelFormatError(f"it has no backbone called {model.base_model_prefix!r}")


def detach_backbone(model: Any) -> nn.Module:
    """Put `IdentityBackbone` in the place of the backbone, and return the backbone."""
    name = backbone_name(model)
    backbone: nn.Module = getattr(model, name)
    setattr(model, name, IdentityBackbone())
    return backbone
