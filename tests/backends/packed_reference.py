"""Reference for GEMMs of packed weights in Triton, and the comparison with it. float16, whose casts the interpreter rounds."""

from __future__ import annotations

import torch
import torch.nn.functional as F

DTYPE = torch.float16


def expected(x: torch.Tensor, known: torch.Tensor, bias: torch.Tensor | None, *, gated: bool) -> torch.Tensor:
    """Compute the GEMM, and the activation if `gated`, in float64; `known` has the values of the weight."""
    out = F.linear(x.double(), known.double(), None if bias is None else bias.double())
    if not gated:
        return out
    gate, up = out.chunk(2, -1)
    return F.silu(gate) * up


def check(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare a result with the reference."""
    assert found.dtype == DTYPE
    assert found.shape == wanted.shape
    assert (found.double() - wanted).norm() < 2e-3 * wanted.norm()
