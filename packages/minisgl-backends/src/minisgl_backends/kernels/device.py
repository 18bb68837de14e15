"""Properties of GPUs that kernels depend on."""

from __future__ import annotations

from functools import cache

import torch


@cache
def has_large_shared_memory(device: torch.device) -> bool:
    """Return True if a program can use 200 KB of shared memory, as on data-center GPUs since Hopper; else assume 96 KB."""
    if device.type != "cuda":
        return False
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0)) >= 200_000
