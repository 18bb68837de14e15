"""Base class of the Triton providers of all roles."""

import torch

from minisgl_backends.requirements import triton_unsupported
from minisgl_core.contracts.ops import OpsProvider


class TritonProvider(OpsProvider):
    """Base of the providers of Triton kernels.

    It has the activation, since two roles use it: `TritonNorm`, and `TritonLinear` for GEMMs without a fused activation.
    Subclasses list it before the role's class, so that its `silu_and_mul` overrides that of `NormOps`.
    """

    @classmethod
    def unsupported(cls, device: torch.device, dtype: torch.dtype) -> list[str]:
        return triton_unsupported(device)

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        from minisgl_backends.kernels import activation

        self._activation = activation

    def uses_pdl(self, num_rows: int) -> bool:
        """Return True if launches over `num_rows` tokens use PDL; see `minisgl_backends.kernels.dependent_launch`."""
        return False

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `NormOps.silu_and_mul`. GEMMs without a fused activation call it too."""
        return self._activation.silu_and_mul(gate_up, pdl=self.uses_pdl(len(gate_up)))


def dense(x: torch.Tensor) -> torch.Tensor:
    """Return `x` if its last dimension is contiguous, as kernels expect, else a copy. Other dimensions may have any stride."""
    return x if x.stride(-1) == 1 else x.contiguous()
