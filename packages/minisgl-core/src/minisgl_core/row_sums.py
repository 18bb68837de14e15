"""Running sums that ranks can rely on."""

from __future__ import annotations

import torch


def cumsum_of_rows(x: torch.Tensor) -> torch.Tensor:
    """Running sums of each row, float [N, V] to [N, V]; of the same rows always the same bits, on GPUs too."""
    if len(x) != 1:
        return x.cumsum(-1)
    # Of a lone row, torch on CUDA adds up the parts in whatever order they come, which differs from run to run.
    return x.expand(2, -1).cumsum(-1)[:1]
