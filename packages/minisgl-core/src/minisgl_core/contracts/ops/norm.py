"""Contract of the norm role: norms and activations. See the package for the shape legend."""

import torch
import torch.nn.functional as F

from minisgl_core.contracts.ops.provider import OpsProvider


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the reference result of `NormOps.rms_norm`, for roles that fuse a norm."""
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32.to(weight.dtype) * weight).to(x.dtype)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return the reference result of `NormOps.silu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class NormOps(OpsProvider):
    """RMSNorm, with and without the residual add, and the activations of gated MLPs."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalize by the root mean square (arXiv 1910.07467) over the last dimension, with statistics in float32.

        Args:
            x: [..., H].
            weight: [H], in x's dtype or float32. With float32, the result is rounded once.
            eps: added to the mean square.

        Returns:
            Like `x`.
        """
        # Not a call of the function above, since Python calls count in a decode step on a CPU.
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        return (x32.to(weight.dtype) * weight).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``rms_norm(x + residual)`` and ``x + residual``, each [..., H]. May overwrite both inputs. See `rms_norm`."""
        residual = x + residual
        return self.rms_norm(residual, weight, eps), residual

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return ``silu(gate) * up``, [..., I], of ``[..., gate | up]``, [..., 2 * I]."""
        return silu_and_mul(gate_up)

    def gelu_tanh_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return ``gelu(gate) * up``, [..., I], of ``[..., gate | up]``, [..., 2 * I].

        GELU is the tanh approximation (arXiv 1606.08415): ``gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))``.
        """
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up
