"""Reference for the CUDA C++ GEMMs, and a marker for tests that need a Hopper GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool) -> torch.Tensor:
    """Compute the GEMM in float64, rounded where the kernel rounds."""
    out = x.double() @ weight.double().T
    out = (out if bias is None else out + bias.double()).bfloat16()
    if not gated:
        return out.double()
    gate, up = out.chunk(2, -1)
    return (F.silu(gate.float()).bfloat16().float() * up.float()).double()
