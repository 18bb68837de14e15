"""Base class of all roles of ops."""

from typing import ClassVar

import torch


class OpsProvider:
    """Base class of the roles. A provider of the kind ``ops`` subclasses one or more roles and is instantiated once.

    A provider with an `__init__` of its own calls ``super().__init__(device, dtype)``.

    Attributes:
        device: device of all tensors.
        dtype: dtype of the model.
    """

    plugin_api: ClassVar[str] = ">=2,<3"

    @classmethod
    def unsupported(cls, device: torch.device, dtype: torch.dtype) -> list[str]:
        """Return the reasons why these kernels cannot run, one sentence each; empty if they can."""
        return []

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
