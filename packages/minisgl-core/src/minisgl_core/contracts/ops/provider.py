"""The part of the contract that all roles share."""

from __future__ import annotations

from typing import ClassVar

import torch


class OpsProvider:
    """Base class of the roles. A provider of the kind ``ops`` subclasses roles; one instance serves all that it has.

    A provider with several base classes passes `device` and `dtype` on by ``super().__init__(device, dtype)``.

    Attributes:
        device: where all tensors are.
        dtype: of the model.
    """

    plugin_api: ClassVar[str] = ">=2,<3"

    @classmethod
    def unsupported(cls, device: torch.device, dtype: torch.dtype) -> list[str]:
        """Say why these kernels cannot run here, one sentence per reason; empty if they can."""
        return []

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
